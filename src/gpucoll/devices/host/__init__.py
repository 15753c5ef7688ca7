"""Host devices: emulate GPUs in host memory, with their rules, for machines without a GPU.

A test device (`docs/host_device.md`): streams are threads, memory is shared memory of this host,
kernels are those of the CPU. It does not show how fast a GPU is.
"""
