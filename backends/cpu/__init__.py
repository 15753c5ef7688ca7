"""Backends of host arrays: `host` for the ranks of one host, `world` for those of several."""
