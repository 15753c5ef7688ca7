"""JAX's own collectives between processes, over gpucoll."""

from gpucoll.integrations.jax.processes.start import use_for_processes

__all__ = ["use_for_processes"]
