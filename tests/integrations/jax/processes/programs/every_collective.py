"""JAX's collectives over all processes, and over some: every value is compared."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_enable_x64", True)
INTEGERS = [f"{kind}{n}" for kind in ("int", "uint") for n in (8, 16, 32, 64)]
DTYPES = ["bool", *INTEGERS, "float32", "float64", "bfloat16", "complex64", "complex128"]
REDUCED: dict[str, tuple[Any, Any]] = {
    "psum": (jax.lax.psum, np.sum),
    "pmin": (jax.lax.pmin, np.min),
    "pmax": (jax.lax.pmax, np.max),
}


def given(mesh, values, spec):
    return jax.make_array_from_callback(
        values.shape, NamedSharding(mesh, spec), lambda index: values[index]
    )


def run(mesh, function, values, spec, out):
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=out, check_vma=False)
    return jax.jit(mapped)(given(mesh, values, spec))


def check(result, expected, what):
    assert result.shape == expected.shape, (what, result.shape, expected.shape)
    for shard in result.addressable_shards:
        got, wanted = np.asarray(shard.data), expected[shard.index]
        assert got.dtype == wanted.dtype, (what, got.dtype, wanted.dtype)
        assert np.array_equal(got, wanted), (what, got, wanted)


def values_of(dtype, n):
    numbers = np.arange(n * 4 * n) % 5
    return numbers.astype(dtype) if dtype != "bfloat16" else np.asarray(numbers, jnp.bfloat16)


def every_dtype(mesh, axis, n):
    shift = [(k, (k + 1) % n) for k in range(n)]
    for dtype in sys.argv[2:] or DTYPES:
        x = values_of(dtype, n)
        blocks = x.reshape(n, -1)
        for name, (collective, combine) in REDUCED.items():
            if dtype == "bool" or ("complex" in dtype and name != "psum"):
                continue
            expected = combine(blocks.astype(np.float64) if dtype == "bfloat16" else blocks, axis=0)
            result = run(mesh, lambda part, f=collective: f(part, axis), x, P(axis), P())
            check(result, expected.astype(x.dtype), (name, dtype))
        if dtype != "bfloat16":  # jaxlib has no all_gather of it over MPI
            result = run(mesh, lambda part: jax.lax.all_gather(part, axis), x, P(axis), P())
            check(result, blocks, ("all_gather", dtype))
        result = run(mesh, lambda part: jax.lax.ppermute(part, axis, shift), x, P(axis), P(axis))
        check(result, np.roll(blocks, 1, axis=0).ravel(), ("ppermute", dtype))
        result = run(
            mesh, lambda part: jax.lax.all_to_all(part, axis, 0, 0, tiled=True), x, P(axis), P(axis)
        )
        check(result, x.reshape(n, n, -1).swapaxes(0, 1).ravel(), ("all_to_all", dtype))
        if dtype not in ("bool", "bfloat16"):
            result = run(
                mesh, lambda part: jax.lax.psum_scatter(part, axis, tiled=True), x, P(axis), P(axis)
            )
            check(result, blocks.sum(axis=0, dtype=x.dtype), ("psum_scatter", dtype))


def some_devices(devices):
    """Rows and columns at once, the devices in another order, and half of them."""
    n = len(devices)
    grid = Mesh(devices.reshape(2, n // 2), ("row", "column"))
    x = np.arange(4.0 * n).reshape(2, 2 * n)
    blocks = x.reshape(2, n // 2, 4)

    def both(part):
        return jax.lax.psum(part, "row"), jax.lax.psum(part, "column")

    mapped = jax.shard_map(
        both,
        mesh=grid,
        in_specs=P("row", "column"),
        out_specs=(P(None, "column"), P("row", None)),
        check_vma=False,
    )
    rows, columns = jax.jit(mapped)(given(grid, x, P("row", "column")))
    check(rows, blocks.sum(axis=0).reshape(1, -1), "psum over rows")
    check(columns, blocks.sum(axis=1), "psum over columns")

    backwards = Mesh(devices[::-1], ("i",))
    y = np.arange(2.0 * n)
    result = run(backwards, lambda part: jax.lax.all_gather(part, "i", tiled=True), y, P("i"), P())
    check(result, y, "backwards")

    few = Mesh(devices[: n // 2], ("i",))
    if any(device.process_index == jax.process_index() for device in devices[: n // 2]):
        y = np.arange(3.0 * (n // 2))
        result = run(few, lambda part: jax.lax.psum(part, "i"), y, P("i"), P())
        check(result, y.reshape(n // 2, 3).sum(axis=0), "half of the devices")


def whole_arrays(mesh, n):
    """Products of arrays that XLA divides, and the functions for whole programs."""
    a = np.arange(float(n * 8)).reshape(n, 8)
    product = jax.jit(lambda a, b: a.T @ b, out_shardings=NamedSharding(mesh, P()))
    check(product(given(mesh, a, P("i")), given(mesh, a, P("i"))), a.T @ a, "product")
    mine = np.full(3, float(jax.process_index()))
    everyone = multihost_utils.process_allgather(mine)
    assert np.array_equal(everyone[:, 0], np.arange(jax.process_count())), everyone
    first = multihost_utils.broadcast_one_to_all(mine + 5)
    assert np.array_equal(first, np.full(3, 5.0)), first
    multihost_utils.sync_global_devices("here")


def main() -> None:
    jax.distributed.initialize()  # as a program does that is not made for gpucoll
    devices = np.array(jax.devices())
    n = len(devices)
    assert n == int(sys.argv[1]), devices
    mesh = Mesh(devices, ("i",))
    every_dtype(mesh, "i", n)
    whole_arrays(mesh, n)
    if n % 2 == 0:
        some_devices(devices)
    print("all as it should be")


main()
