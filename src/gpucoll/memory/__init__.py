"""Shared arenas for arrays: their allocator, and a memory handler of NumPy on top of it."""
