"""GPU arrays without a vendor's library."""
