"""The control channel: every communicator's ranks around one segment, whatever moves its arrays.

Bootstrap, signatures, objects, barriers, abort and the answers to mismatches go through here, for
communicators of GPU arrays too.
"""
