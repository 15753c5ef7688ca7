"""``all_reduce(compression=...)``: options, checks, and the exchange itself."""
