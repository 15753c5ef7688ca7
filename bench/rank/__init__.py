"""What runs inside every rank of every library measured: inputs, loops, and the command loop.

Needs Python 3.10 and NumPy beside the library to be measured, and nothing else: see `__main__`.
"""
