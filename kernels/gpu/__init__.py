"""Kernels for GPUs: one C++ source for CUDA and HIP, launched by the vendor's driver.

`gpucoll.devices.kernels` compiles and launches them. Nothing here imports Numba before it is
needed.
"""
