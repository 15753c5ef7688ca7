"""The engine below Horovod's names: it matches tensors by name, whatever order ranks submit in."""
