"""gpucoll under the names of other frameworks; by the public API only."""
