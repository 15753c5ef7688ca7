"""The engine below Horovod's names: tensors matched by name, in whatever order ranks submit them."""
