"""What AMD's collectives library does differently from NVIDIA's (`gpucoll.backends.nccl`)."""
