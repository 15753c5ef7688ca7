"""Arrays in host memory through MPI, and how ranks meet over it."""
