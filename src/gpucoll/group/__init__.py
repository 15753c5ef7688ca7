"""Groups of ranks, on which every communicator stands, and their division.

`protocol.Group` is all that the modules above use; `host` is the ranks of one host around one
segment, and `world` the ranks of several hosts.
"""
