"""Horovod's own tests on the front: `running` runs a file, `left_out` lists what fails."""
