"""Arrays of every library as buffers: address, count, dtype, device, stream, owner.

Each library is one module and one row of `LIBRARIES`.
"""
