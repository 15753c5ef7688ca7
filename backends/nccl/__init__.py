"""NVIDIA's collectives library, and what it shares with AMD's, which is nearly everything."""
