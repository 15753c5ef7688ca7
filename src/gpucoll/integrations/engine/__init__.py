"""What the integrations of engines (Ray, Dask) share: a run, its ranks' ends, its results."""
