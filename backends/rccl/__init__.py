"""The differences of AMD's collectives library from NVIDIA's (`gpucoll.backends.nccl`)."""
