"""mpi4jax's own tests on gpucoll."""
