"""Shared memory: segments, their layout, flags and waits, and the steps of a call over them."""
