"""A package, so that ``tests.ranks`` is this one whatever else is installed under that name."""
