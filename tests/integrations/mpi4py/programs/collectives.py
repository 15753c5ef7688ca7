"""Collectives of arrays and objects; what comes is compared with NumPy. Runs on mpi4py, too."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
everyone = np.arange(size)


def same(got, want):
    assert np.array_equal(got, want), (got, want)


# Reductions, in place, of several dimensions, as specifications, of long doubles.
x = np.arange(6.0).reshape(2, 3) + rank
total = np.arange(6.0).reshape(2, 3) * size + everyone.sum()
out = np.full((2, 3), -1.0)
comm.Allreduce(x, out)
same(out, total)
again = x.copy()
comm.Allreduce(MPI.IN_PLACE, again, op=MPI.SUM)
same(again, total)
part = np.full(6, -1.0)
comm.Allreduce([x, 3, MPI.DOUBLE], [part, (3, 2), "d"])
same(part, [-1, -1, *total.ravel()[:3], -1])
long = np.full(2, 1 + rank, np.longdouble)
wide = np.empty(2, np.longdouble)
comm.Allreduce(long, wide)
same(wide, np.full(2, (everyone + 1).sum()))
root = size - 1
out = np.full(6, -1.0)
comm.Reduce(x, out if rank == root else None, MPI.MAX, root)
same(out, x.ravel() - rank + root if rank == root else np.full(6, -1.0))
for call, first in ((comm.Scan, 0), (comm.Exscan, 1)):
    out = np.full(2, -7)
    call(np.array([rank, 1]), out)
    n = rank + 1 - first
    same(out, [everyone[:n].sum(), n] if n else [-7, -7])
blocks = np.arange(2.0 * size)
out = np.empty(2)
comm.Reduce_scatter_block(blocks, out)
same(out, blocks[2 * rank : 2 * rank + 2] * size)
counts = [n + 1 for n in range(size)]
blocks = np.arange(float(sum(counts)))
out = np.empty(rank + 1)
comm.Reduce_scatter(blocks, out, counts, MPI.SUM)
same(out, blocks[sum(counts[:rank]) :][: rank + 1] * size)

# Pairs of value and index, and a function of the program.
pair = np.zeros(2, np.dtype([("value", "d"), ("index", "i")], align=True))
pair["value"], pair["index"] = [rank, -rank], rank
best = np.zeros_like(pair)
comm.Allreduce([pair.view("B"), 2, MPI.DOUBLE_INT], [best.view("B"), 2, MPI.DOUBLE_INT], MPI.MAXLOC)
assert best["index"].tolist() == [size - 1, 0]


def matrices(left, right, datatype):
    a, b = (np.frombuffer(item, "d").reshape(2, 2) for item in (left, right))
    b[...] = a @ b


product = MPI.Op.Create(matrices, commute=False)
mine = np.array([[1.0, rank], [0.0, 2.0]])
out = np.empty((2, 2))
four = MPI.DOUBLE.Create_contiguous(4).Commit()  # mpi4py itself compares handles
comm.Allreduce([mine, 1, four], [out, 1, four], product)
want = np.eye(2)
for n in range(size):
    want = want @ np.array([[1.0, n], [0.0, 2.0]])
same(out, want)
product.Free()

# Movements, with blocks of different sizes, and gaps that stay as they are.
whole = np.full((size, 2), -1)
comm.Allgather(np.array([rank, 5]), whole)
same(whole, [[n, 5] for n in range(size)])
gaps = np.full(3 * size, -1)
comm.Allgatherv(np.full(1 + rank % 2, rank), [gaps, [1 + n % 2 for n in range(size)],
                [3 * n for n in range(size)], MPI.LONG])  # fmt: skip
same(gaps, np.concatenate([[n] * (1 + n % 2) + [-1] * (2 - n % 2) for n in range(size)]))
out = np.full(3 * size, -1) if rank == root else None
spec = [out, ([1] * size, [3 * n for n in range(size)]), MPI.LONG] if rank == root else None
comm.Gatherv(np.array([rank]), spec, root=root)
if rank == root:
    same(out, np.concatenate([[n, -1, -1] for n in range(size)]))
    comm.Scatterv([out, ([1] * size, [3 * n for n in range(size)]), MPI.LONG], MPI.IN_PLACE, root)
else:
    out = np.empty(1, int)
    comm.Scatterv(None, out, root=root)
    same(out, [rank])
table = np.empty(size, int)
comm.Alltoall(np.arange(size) + 10 * rank, table)
same(table, 10 * everyone + rank)
sent = np.arange(2 * size) + 100 * rank
got = np.full(3 * size, -1)
comm.Alltoallv([sent, [2] * size], [got, [2] * size, [3 * n for n in range(size)], MPI.LONG])
same(got, np.concatenate([[100 * n + 2 * rank, 100 * n + 2 * rank + 1, -1] for n in range(size)]))
for turn in range(3):  # blocks that follow one another, counted in every way that there is
    counts = [(n + turn) % 3 for n in range(size)]
    places = [sum(counts[:n]) for n in range(size)]
    mine = np.full(counts[rank], rank + 0.5)
    expected = np.concatenate([np.full(count, n + 0.5) for n, count in enumerate(counts)])
    for spec in (
        (counts,),
        (tuple(counts), places, MPI.DOUBLE),
        (np.array(counts), MPI.DOUBLE),
        ((counts, places),),
        ((tuple(counts), np.array(places)), MPI.DOUBLE),
        (counts, None, MPI.DOUBLE),
    ):
        room = np.full(sum(counts) + 2, -1.0)
        comm.Allgatherv(mine, [room, *spec])
        same(room, [*expected, -1, -1])
        if rank == root:
            room[:] = -1
            comm.Gatherv(mine, [room, *spec], root)
            same(room, [*expected, -1, -1])
            comm.Scatterv([room, *spec], mine, root)
        else:
            comm.Gatherv(mine, None, root)
            comm.Scatterv(None, mine, root)
        same(mine, np.full(counts[rank], rank + 0.5))
        sent, got = np.repeat(mine[:1], size) if counts[rank] else np.zeros(size), np.zeros(size)
        comm.Alltoallv([sent, [1] * size], [got, [1] * size, list(range(size)), MPI.DOUBLE])
        same(got, [n + 0.5 if counts[n] else 0 for n in range(size)])
got = np.zeros((size, 2))
comm.Gather(np.array([rank, 1.0]), got if rank == root else None, root)
if rank == root:
    same(got, [[n, 1] for n in range(size)])
own = np.zeros(2)
comm.Scatter(got if rank == root else None, own, root)
same(own, [rank, 1])
letters = bytearray(b"-" * size)
comm.Allgather([bytes([65 + rank]), MPI.CHAR], [letters, MPI.CHAR])
assert letters == bytes(range(65, 65 + size))
buf = bytearray(b"root" if rank == root else b"....")
comm.Bcast(buf, root)
assert buf == b"root"

# Started and prepared ones.
out = np.empty(3)
requests = [comm.Ibcast(again, 0), comm.Iallreduce(np.ones(3), out), comm.Ibarrier()]
MPI.Request.Waitall(requests)
assert not any(requests)
same(out, [size] * 3)
values, out = np.zeros(2), np.empty(2)
prepared = comm.Allreduce_init(values, out)
for step in range(3):
    values[:] = step
    prepared.Start()
    prepared.Wait()
    same(out, [step * size] * 2)

# Objects, small and large.
for n_bytes in (1, 100_000):
    value = {"rank": rank, "text": "x" * n_bytes}
    assert [item["rank"] for item in comm.allgather(value)] == everyone.tolist()
    assert comm.bcast(value, root)["rank"] == root
    gathered = comm.gather(value, root)
    assert (gathered is None) == (rank != root)
    parts = comm.alltoall([(rank, n, "x" * n_bytes) for n in range(size)])
    assert [part[:2] for part in parts] == [(n, rank) for n in range(size)]
    mine = comm.scatter([(n, "x" * n_bytes) for n in range(size)] if rank == root else None, root)
    assert mine[0] == rank
assert comm.allreduce([rank], op=lambda a, b: a + b) == everyone.tolist()
assert comm.reduce(rank, MPI.PROD, root) == (np.prod(everyone) if rank == root else None)
assert comm.scan(1) == rank + 1
assert comm.exscan(1) == (rank or None)
assert comm.allreduce((rank, rank), MPI.MINLOC) == (0, 0)
print("done", flush=True)
