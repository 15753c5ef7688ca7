"""NVIDIA's collectives library, and what it has in common with AMD's, which is nearly all."""
