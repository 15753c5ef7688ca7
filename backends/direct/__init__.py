"""GPU arrays without a vendor's library: over host memory that the GPU and the host share."""
