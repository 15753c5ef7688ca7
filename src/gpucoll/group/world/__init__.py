"""The ranks of several hosts: one `HostGroup` on each, and links between them."""
