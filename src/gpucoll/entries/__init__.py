"""Compiled entries from Python into the loops: CPython built-ins that read arrays themselves."""
