"""What the integrations of Ray and Dask share: a run, the outcomes of its ranks, its results."""
