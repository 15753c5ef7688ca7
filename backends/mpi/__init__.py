"""Arrays in host memory through MPI, and the rendezvous of ranks over it."""
