"""Shared arenas for arrays: their allocator, and NumPy's handler over it."""
