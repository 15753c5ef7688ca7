"""Calls: from arguments to requests, which run at once, queued, in groups or as plans."""
