"""Every function, in jit and outside, beside NumPy."""

import jax
import numpy as np
from checking import run, same
from jax import numpy as jnp

from gpucoll import ANY_SOURCE, ReduceOp
from gpucoll.integrations import jax as gcj

DTYPES = "int8 int32 uint16 float16 bfloat16 float32 complex64 float8_e4m3fn float8_e5m2 bool"


def everyone(comm, shape=(4, 3), dtype="float32"):
    """Return small whole numbers of every rank."""
    size = int(np.prod(shape))
    rows = [np.arange(size).reshape(shape) % 3 + rank % 2 for rank in range(comm.world_size)]
    return [row.astype(jnp.dtype(dtype)) for row in rows]


def both(function, *arguments):
    """Yield the result outside jit, then in jit twice: compiled and found again."""
    yield function(*arguments)
    jitted = jax.jit(function)
    yield jitted(*arguments)
    yield jitted(*arguments)


def check_dtypes(comm):
    for dtype in DTYPES.split():
        rows = everyone(comm, (5,), dtype)
        total = np.sum([row.astype("complex64") for row in rows], axis=0)  # small whole numbers
        if dtype == "bool":
            total = np.logical_or.reduce(rows)
        for found in both(gcj.all_reduce, jnp.asarray(rows[comm.rank])):
            assert found.dtype == dtype
            same(found.astype("complex64"), total.astype("complex64"))
        for found in both(gcj.all_gather, jnp.asarray(rows[comm.rank])):
            same(found.astype("complex64"), np.concatenate(rows).astype("complex64"))


def check_reductions(comm):
    rows, rank = everyone(comm), comm.rank
    x = jnp.asarray(rows[rank])
    for op, function in (("sum", np.sum), ("max", np.max), ("prod", np.prod), ("avg", np.mean)):
        if op == "avg" and comm.world_size == 3:
            continue  # thirds are rounded
        for found in both(lambda x, op=op: gcj.all_reduce(x, op), x):
            same(found, function(rows, axis=0))
    doubled = ReduceOp.scaled_sum(2.0)
    for found in both(lambda x: gcj.all_reduce(x, doubled), x):
        same(found, 2 * np.sum(rows, axis=0))
    for root in range(comm.world_size):
        for found in both(lambda x, root=root: gcj.reduce(x, root=root), x):
            assert (found is None) == (rank != root)
            if rank == root:
                same(found, np.sum(rows, axis=0))
    for found in both(gcj.scan, x):
        same(found, np.sum(rows[: rank + 1], axis=0))
    for found in both(gcj.exclusive_scan, x):
        same(found, np.sum(rows[:rank], axis=0) if rank else np.zeros_like(x))


def check_movements(comm):
    size, rank = comm.world_size, comm.rank
    rows = everyone(comm, (2 * size, 3))
    x = jnp.asarray(rows[rank])
    for found in both(gcj.all_gather, x):
        same(found, np.concatenate(rows))
    for found in both(gcj.all_gather, jnp.float32(rank)):
        same(found, np.arange(size, dtype=np.float32))
    for found in both(gcj.reduce_scatter, x):
        same(found, np.sum(rows, axis=0)[2 * rank : 2 * rank + 2])
    for found in both(gcj.all_to_all, x):
        same(found, np.concatenate([row[2 * rank : 2 * rank + 2] for row in rows]))
    for root in range(size):
        for found in both(lambda x, root=root: gcj.broadcast(x, root), x):
            same(found, rows[root])
        for found in both(lambda x, root=root: gcj.scatter(x, root), x):
            same(found, rows[root][2 * rank : 2 * rank + 2])
        for found in both(lambda x, root=root: gcj.gather(x, root), x):
            assert (found is None) == (rank != root)
            if rank == root:
                same(found, np.concatenate(rows))


def check_trees(comm):
    tree = {"a": jnp.full(3, comm.rank), "b": [jnp.ones((2, 2)), jnp.float32(comm.rank)]}
    total = comm.world_size * (comm.world_size - 1) // 2
    for found in both(gcj.all_reduce, tree):
        same(found["a"], np.full(3, total))
        same(found["b"][0], np.full((2, 2), comm.world_size))
        same(found["b"][1], total)
    for found in both(lambda tree: gcj.broadcast(tree, comm.world_size - 1), tree):
        same(found["a"], np.full(3, comm.world_size - 1))
    assert gcj.all_reduce([]) == []


def check_messages(comm):
    size, rank = comm.world_size, comm.rank
    after, before = (rank + 1) % size, (rank - 1) % size
    x = jnp.full((3, 2), rank, jnp.float32)
    for found in both(lambda x: gcj.send_recv(x, after, before), x):
        same(found, np.full((3, 2), before))
    like = jnp.zeros(2, jnp.int32)
    for found in both(lambda x: gcj.send_recv(x, after, before, like), jnp.arange(2) + rank):
        same(found, np.arange(2) + before)
    if size > 1 and rank < 2:

        def ping(x):
            if rank == 0:
                gcj.send(x, 1, tag=3)
                return gcj.recv(1, like=x)
            found = gcj.recv(ANY_SOURCE, 3, shape=(3, 2), dtype=jnp.float32)
            gcj.send(found + 1, 0)
            return found

        for found in both(ping, x):
            same(found, np.full((3, 2), 1 - rank))


def check_batches(comm):
    size, rank = comm.world_size, comm.rank
    xs = jnp.arange(24.0).reshape(4, 6) * (rank + 1)
    everything = [np.arange(24.0).reshape(4, 6) * (one + 1) for one in range(size)]
    for found in both(jax.vmap(gcj.all_reduce), xs):
        same(found, np.sum(everything, axis=0))
    for found in both(jax.vmap(gcj.all_reduce, in_axes=1, out_axes=1), xs):
        same(found, np.sum(everything, axis=0))
    for found in both(jax.vmap(gcj.all_gather), xs):
        same(found, np.concatenate(everything, axis=1))
    for found in both(jax.vmap(lambda x: gcj.all_gather(x.sum())), xs):
        same(found, np.stack([x.sum(axis=1) for x in everything], axis=1))
    after, before = (rank + 1) % size, (rank - 1) % size
    for found in both(jax.vmap(lambda x: gcj.send_recv(x, after, before)), xs):
        same(found, everything[before])
    wide = jnp.arange(4.0 * size * 2).reshape(4, size * 2) + rank
    wides = [np.arange(4.0 * size * 2).reshape(4, size * 2) + one for one in range(size)]
    for found in both(jax.vmap(gcj.reduce_scatter), wide):
        same(found, np.sum(wides, axis=0)[:, 2 * rank : 2 * rank + 2])
    for found in both(jax.vmap(jax.vmap(gcj.all_reduce)), xs[None]):
        same(found[0], np.sum(everything, axis=0))


def check_sizes(comm):
    for shape in ((0,), (2, 0, 3), (1,), (1 << 20,)):
        for found in both(gcj.all_reduce, jnp.ones(shape)):
            same(found, np.full(shape, comm.world_size))


def check_other_communicators(comm):
    other = comm.split(comm.rank % 2)
    for found in both(lambda x: gcj.all_reduce(x, comm=other), jnp.ones(3)):
        same(found, np.full(3, other.world_size))
    other.close()


if __name__ == "__main__":
    run(globals())
