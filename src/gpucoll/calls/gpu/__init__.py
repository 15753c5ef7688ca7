"""The same for GPU arrays: calls on streams, and what is kept of calls made before."""
