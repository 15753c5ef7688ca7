"""The CPU backend within one host: loops over its shared memory, through slots, stages, arenas."""
