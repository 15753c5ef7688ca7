"""Two groups that send to each other: rank 0 of COMM_WORLD, and all others. Runs on mpi4py, too."""

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
is_first = world.rank == 0
local = world.Split(0 if is_first else 1)
comm = local.Create_intercomm(0, world, 1 if is_first else 0, 17)
n_others = world.size - 1 if is_first else 1
assert comm.Is_inter() and not comm.Is_intra() and type(comm) is MPI.Intercomm
assert (comm.rank, comm.size, comm.remote_size) == (local.rank, local.size, n_others)
group = comm.remote_group
assert MPI.Group.Translate_ranks(group, None, world.group) == (
    list(range(1, world.size)) if is_first else [0]
)
me = world.rank

# Messages: destinations and sources are ranks of the other group.
status = MPI.Status()
if is_first:
    for rank in range(n_others):
        comm.send({"task": rank}, rank, 3)
    seen = {}
    for _ in range(n_others):
        comm.probe(MPI.ANY_SOURCE, 4, status)
        source = status.source
        seen[source] = comm.recv(source=source, tag=4, status=status)
        assert status.source == source
    assert seen == {rank: ("done", rank) for rank in range(n_others)}
    row = np.zeros(3)
    for _ in range(n_others):
        request = comm.Irecv(row, MPI.ANY_SOURCE, 5)
        request.Wait(status)
        assert row.tolist() == [status.source] * 3
else:
    while not comm.iprobe(0, 3):
        pass
    message = comm.mprobe(0, 3, status)
    task = message.recv()["task"]
    assert task == comm.rank and status.source == 0
    comm.issend(("done", task), 0, 4).wait()
    comm.Send(np.full(3, 1.0 * comm.rank), 0, 5)
comm.Barrier()
comm.Ibarrier().Wait()

# Collectives give what the other group has.
root = (MPI.ROOT if me == 0 else MPI.PROC_NULL) if is_first else 0
assert comm.bcast("from 0", root) == (None if is_first else "from 0")
last = (MPI.ROOT if me == world.size - 1 else MPI.PROC_NULL) if not is_first else n_others - 1
assert comm.bcast("from last", last) == ("from last" if is_first else None)
assert comm.gather(me, root) == (list(range(1, world.size)) if is_first else None)
parts = [10 * rank for rank in range(n_others)] if is_first else None
assert comm.scatter(parts, root) == (None if is_first else 10 * comm.rank)
assert comm.allgather(me) == (list(range(1, world.size)) if is_first else [0])
sent = [(me, rank) for rank in range(n_others)]
expected = [(rank + 1, 0) for rank in range(n_others)] if is_first else [(0, comm.rank)]
assert comm.alltoall(sent) == expected
total = sum(range(1, world.size)) if is_first else 0
assert comm.allreduce(me) == total
out = np.zeros(2)
comm.Allreduce(np.array([me, 1.0]), out)
assert out.tolist() == [total, n_others]

# More of them.
twin = comm.Dup()
assert twin.allgather("twin") == ["twin"] * n_others
twin.Free()
both = comm.Merge(high=is_first)
assert both.size == world.size and both.allgather(me) == [*range(1, world.size), 0]
both.Free()
comm.Free()
assert comm == MPI.COMM_NULL

world.Barrier()
print("done", flush=True)
