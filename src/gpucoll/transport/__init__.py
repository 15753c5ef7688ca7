"""The means by which bytes and signals get from rank to rank: shared segments, flags, sockets."""
