"""The kernels of `gpucoll.kernels.gpu` on a vendor's GPU: compiled, kept, loaded and launched.

By the vendor's own compiler library (NVRTC, hipRTC) and driver; no array library takes part.
"""
