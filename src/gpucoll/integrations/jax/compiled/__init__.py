"""The compiled part: what XLA calls."""
