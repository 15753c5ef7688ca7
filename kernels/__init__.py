"""Code that only processes bytes: copy, reduce, cast. It never waits, and knows no ranks."""
