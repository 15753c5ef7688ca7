"""Kernels for GPUs: one C++ source for CUDA and HIP, launched through CuPy.

Nothing here imports CuPy, Numba or PyTorch before it is needed.
"""
