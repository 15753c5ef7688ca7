"""What of mpi4jax's own tests (collective_ops, test_jax_transforms.py) is not run, with the reason.

Its other files test its own package: decorators, checks of arguments, the versions of JAX, its
examples, and what was compiled.
"""

from __future__ import annotations

FILES = ("collective_ops", "test_jax_transforms.py")
TESTS = 95
"""So many there are in these files (mpi4jax 33d6389b, 2026-07-17)."""

LEFT_OUT: dict[str, str] = {
    "test_abort_on_error": "an error is an exception here, and does not abort the process",
    "test_deadlock_on_exit": "starts Python without the alias; programs/ending.py tests the same",
    "test_debug_logging": "mpi4jax's compiled part prints each call",
    "test_set_logging_from_envvar": "mpi4jax's compiled part prints each call",
    "test_mpi_abi_info": "there is no MPI",
    "test_mpi_abi_compatibility_check": "there is no MPI",
    "test_mpi_abi_skip_check": "there is no MPI",
    "test_sendrecv_jacfwd": "expects that sendrecv has no forward mode; here it has",
}
"""By the name of the test, why it is not run."""
