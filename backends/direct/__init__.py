"""GPU arrays without a vendor's library: over host memory that GPU and host share."""
