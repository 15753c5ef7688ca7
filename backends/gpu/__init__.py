"""The basis of every GPU backend: calls on streams, watched by a monitor until they are done."""
