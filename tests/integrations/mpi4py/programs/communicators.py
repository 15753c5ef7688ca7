"""Groups, communicators, topologies, derived datatypes, shared windows. Runs on mpi4py, too."""

import pickle

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()

# Groups and communicators; one is made by its members alone, twice.
group = comm.Get_group()
last_two = group.Incl([size - 1, size - 2])
for _ in range(2):
    if last_two.Get_rank() != MPI.UNDEFINED:
        pair = comm.Create_group(last_two, tag=3)
        assert (pair.Get_size(), pair.Get_rank()) == (2, size - 1 - rank)
        assert pair.allgather(rank) == [size - 1, size - 2]
        pair.Free()
assert comm.Create(last_two) == MPI.COMM_NULL or rank >= size - 2
half = comm.Split(rank % 2, -rank)
assert half.allgather(rank) == list(range(size))[::-1][(size - 1 - rank) % 2 :: 2]
twin = half.Dup()
assert MPI.Comm.Compare(half, twin) == MPI.CONGRUENT
assert MPI.Comm.Compare(half, half) == MPI.IDENT
assert MPI.Group.Union(last_two, group).Get_size() == size
twin.Free()
half.Free()
node = comm.Split_type(MPI.COMM_TYPE_SHARED)
assert node.Get_size() == size
assert comm.Split(MPI.UNDEFINED) == MPI.COMM_NULL


class Own(MPI.Intracomm):
    """A class of the program's own."""

    def __new__(cls, given=None):
        self = super().__new__(cls, given)
        self.factor = 2
        return self

    def doubled(self, x):
        return self.allreduce(x) * self.factor


assert Own(comm).doubled(1) == 2 * size
key = MPI.Comm.Create_keyval(copy_fn=True)
comm.Set_attr(key, "kept")
twin = comm.Dup()
assert twin.Get_attr(key) == "kept"
comm.Delete_attr(key)
assert comm.Get_attr(key) is None and twin.Get_attr(key) == "kept"
twin.Free()
assert comm.Get_attr(MPI.TAG_UB) > 30_000

# Messages and collectives of one communicator never meet those of another.
twin = comm.Dup()
if size > 1 and rank < 2:
    requests = [comm.isend("first", 1 - rank, 1), twin.isend("twin", 1 - rank, 1)]
    assert twin.recv(source=1 - rank, tag=1) == "twin"
    assert comm.recv(source=1 - rank, tag=1) == "first"
    MPI.Request.waitall(requests)
twin.Free()

# A grid with edges; its rows; neighbours.
grid = comm.Create_cart([size, 1], periods=[False, True])
assert grid.Get_coords(rank) == [rank, 0]
below, above = grid.Shift(0, 1)
assert below == (rank - 1 if rank else MPI.PROC_NULL)
edge = np.array([float(rank)])
ghost = np.array([-1.0])
grid.Sendrecv(edge, above, 0, ghost, below, 0)
assert ghost[0] == rank - 1
row = grid.Sub([True, False])
assert (row.Get_size(), row.Get_rank(), row.dims) == (size, rank, [size])
got = np.full(4, -1.0)
grid.Neighbor_alltoall(np.arange(4.0) + 10 * rank, got)
up = 10 * (rank + 1) if rank < size - 1 else -1
down = 10 * (rank - 1) + 1 if rank else -1
assert got[:2].tolist() == [down, up]
assert MPI.Compute_dims(12, 2) == [4, 3]
row.Free()
grid.Free()

# Derived datatypes.
matrix = np.arange(12.0).reshape(3, 4)
column = MPI.DOUBLE.Create_vector(3, 1, 4).Create_resized(0, 8).Commit()
block = MPI.DOUBLE.Create_subarray([3, 4], [2, 2], [1, 1]).Commit()
indexed = MPI.DOUBLE.Create_indexed([1, 2], [0, 5]).Commit()
record = np.dtype([("a", "i4"), ("b", "f8")], align=True)
struct = MPI.Datatype.Create_struct([1, 1], [0, 8], [MPI.INT, MPI.DOUBLE]).Commit()
if size > 1 and rank == 0:
    comm.Send([matrix, 2, column], 1)
    comm.Send([matrix, 1, block], 1)
    comm.Send([matrix, 1, indexed], 1)
    comm.Send([np.array([(1, 2.5), (3, 4.5)], record).view("B"), 2, struct], 1)
elif rank == 1:
    out = np.zeros(6)
    comm.Recv(out, 0)
    assert out.tolist() == [0, 4, 8, 1, 5, 9]
    into = np.zeros((3, 4))
    comm.Recv([into, 1, block], 0)
    assert into[1:, 1:3].tolist() == [[5, 6], [9, 10]] and into.sum() == 30
    out = np.zeros(3)
    comm.Recv(out, 0)
    assert out.tolist() == [0, 5, 6]
    rows = np.zeros(2, record)
    comm.Recv([rows.view("B"), 2, struct], 0)
    assert rows.tolist() == [(1, 2.5), (3, 4.5)]
packed = bytearray(MPI.DOUBLE.Pack_size(3, comm))
assert MPI.DOUBLE.Pack(np.arange(3.0), packed, 0, comm) == 24
turned = np.zeros((4, 3))
types = [MPI.DOUBLE.Create_vector(3, 1, 4).Commit()] * size
sent = matrix.copy() + 100 * rank
received = np.zeros((size, 3))
comm.Alltoallw(
    [sent, [1] * size, [8 * (n % 4) for n in range(size)], types],
    [received, [3] * size, [24 * n for n in range(size)], [MPI.DOUBLE] * size],
)
assert received.tolist() == [(matrix[:, rank % 4] + 100 * n).tolist() for n in range(size)]

# Memory that all ranks of the host share.
window = MPI.Win.Allocate_shared(8 * size if rank == 0 else 0, 8, comm=node)
memory, unit = window.Shared_query(0)
shared = np.ndarray(buffer=memory, dtype="d", shape=(size,))
assert unit == 8
window.Fence()
shared[rank] = rank + 1
window.Fence()
assert shared.tolist() == [n + 1.0 for n in range(size)]
window.Fence()
for _ in range(20):
    window.Lock(0)
    shared[0] += 1
    window.Unlock(0)
window.Fence()
assert shared[0] == 1 + 20 * size
window.Fence()
del shared, memory
window.Free()
node.Free()
assert pickle.loads(pickle.dumps(MPI.SUM)) is MPI.SUM
assert pickle.loads(pickle.dumps(comm)) is MPI.COMM_WORLD or comm is not MPI.COMM_WORLD
print("done", flush=True)
