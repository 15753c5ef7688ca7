"""The CPU backend of one host: all-reduce through slots, stages or shared arenas."""
