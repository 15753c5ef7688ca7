"""What touches the bytes, and nothing else: copy, reduce, cast. No waiting, no ranks."""
