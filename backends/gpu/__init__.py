"""What every GPU backend stands on: calls on streams, watched from beside until they are done."""
