"""Backends of host arrays: `host` moves those of one host's ranks, `world` those of several."""
