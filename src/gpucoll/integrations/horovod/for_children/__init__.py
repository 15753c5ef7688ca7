"""A folder for sys.path in which processes that a program starts find `horovod`."""
