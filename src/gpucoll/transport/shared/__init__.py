"""Shared memory: segments, their layout, flags and waits, and the steps of a call over them."""

MAX_RANKS = 256
"""The most ranks of one host."""
