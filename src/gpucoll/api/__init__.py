"""What users call: the communicator, one file for each family of calls, and `init`."""
