"""What every communicator stands on: a group of ranks, and how it is divided.

`protocol.Group` is what all above knows of one; `host` is the ranks of one host around one segment.
"""
