"""oneCCL, Intel's library of collectives: GPUs through SYCL queues, and host memory."""
