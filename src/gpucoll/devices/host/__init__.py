"""Host devices: the rules of a GPU over host memory, so that machines without one have some.

A test device (`docs/host_device.md`): streams are threads, memory is shared memory of this host,
kernels are those of the CPU. It says nothing about how fast a GPU is.
"""
