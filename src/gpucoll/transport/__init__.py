"""How bytes and signals get from one rank to another: shared segments, flags, sockets."""
