"""The ranks of one host around one segment: its members, calls, recovery."""
