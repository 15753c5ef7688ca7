"""Compiled entries into the loops: built-ins of CPython that read arrays themselves."""
