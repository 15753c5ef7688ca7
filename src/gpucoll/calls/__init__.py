"""From arguments to requests, and how those run: at once, queued, in groups, as plans."""
