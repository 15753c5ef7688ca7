"""The code that runs in every rank of every measured library: inputs, loops, and the command loop.

It needs only Python 3.10, NumPy and the measured library: see `__main__`.
"""
