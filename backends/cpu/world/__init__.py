"""Host arrays of ranks on several hosts: phases inside each host, and exchanges between leaders."""
