"""Calls on GPU arrays: they run on streams, and calls made before are cached."""
