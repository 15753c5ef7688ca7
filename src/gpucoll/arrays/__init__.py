"""Arrays of every library as buffers: address, count, dtype, device, stream, owner.

Each library has one module and one row of `LIBRARIES`.
"""
