"""The kernels of `gpucoll.kernels.gpu` on a vendor's GPU: compiled, kept, loaded and launched.

They use the vendor's own compiler library (NVRTC, hipRTC) and driver, and no array library.
"""
