"""JAX's collectives between processes: every dtype, and Keras on them."""

from __future__ import annotations

import importlib.util

import pytest

pytest.importorskip("jax", minversion="0.5")


@pytest.mark.parametrize(("n_ranks", "n_devices"), [(2, 1), (2, 2), (4, 1), (3, 2), (1, 4)])
def test_every_dtype(run_program, n_ranks, n_devices):
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={n_devices}"}
    total = n_ranks * n_devices
    done = run_program("every_collective.py", n_ranks, total, environment=flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all as it should be") == n_ranks


def test_data_parallel_of_keras(run_program):
    """Two processes get the losses and weights of one."""
    if importlib.util.find_spec("keras") is None:  # an import would want its default backend
        pytest.skip("keras is not installed")
    found = {n_ranks: run_program("keras_data_parallel.py", n_ranks) for n_ranks in (1, 2)}
    for done in found.values():
        assert done.returncode == 0, done.stderr
    (one,) = numbers_of(found[1].stdout)
    for numbers in numbers_of(found[2].stdout):
        assert numbers == pytest.approx(one, rel=1e-5)


def numbers_of(text):
    return [[float(word) for word in line.split()] for line in text.splitlines()]
