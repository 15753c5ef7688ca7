"""One-sided calls on the memory of other ranks. Runs on mpi4py, too."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
right, left = (rank + 1) % size, (rank - 1) % size


def fails(call, kind):
    try:
        call()
    except kind:
        return
    raise AssertionError(f"nothing was raised, but {kind} was expected")


own = np.zeros(12, "i")
windows = [MPI.Win.Create(own, own.itemsize, comm=comm)]
windows.append(MPI.Win.Allocate(own.nbytes, own.itemsize, comm=comm))
for window, flavor in zip(windows, (MPI.WIN_FLAVOR_CREATE, MPI.WIN_FLAVOR_ALLOCATE), strict=True):
    memory = np.frombuffer(window.tomemory(), "i")
    memory[:] = -1
    assert window.flavor == flavor and window.Get_attr(MPI.WIN_SIZE) == 48

    # Between two fences everybody writes to the right, whole and with gaps.
    window.Fence()
    window.Put(np.full(2, rank, "i"), right, 1)
    column = MPI.INT.Create_vector(2, 1, 3).Commit()
    window.Put(np.array([100 + rank, 200 + rank], "i"), right, (5, 1, column))
    window.Put([np.array([7, 0, 0, 8], "i"), 1, column], right, (9, 2, MPI.INT))
    window.Put(np.ones(1, "i"), MPI.PROC_NULL)
    window.Fence()
    expected = [-1, left, left, -1, -1, 100 + left, -1, -1, 200 + left, 7, 8, -1]
    assert memory.tolist() == expected, memory
    got, spread = np.zeros(3, "i"), np.full(4, -5, "i")
    window.Get([got, 2, MPI.INT], right, (5, 1, column))
    window.Get([spread, 1, column], right, (1, 2, MPI.INT))
    window.Fence()
    assert got.tolist() == [100 + rank, 200 + rank, 0]
    assert spread.tolist() == [rank, -5, -5, rank]
    column.Free()

    # All accumulate on rank 0; nothing is lost, and each number is given out once.
    memory[:] = 0
    comm.Barrier()
    numbers = []
    for _ in range(50):
        number = np.zeros(1, "i")
        window.Lock(0, MPI.LOCK_SHARED)
        window.Accumulate(np.array([rank, 1], "i"), 0, 1)
        window.Fetch_and_op(np.ones(1, "i"), number, 0, 0)
        window.Unlock(0)
        numbers.append(int(number[0]))
    before = np.zeros(2, "i")
    comm.Barrier()
    if rank == 0:
        window.Lock(0)
        window.Get_accumulate(np.array([9, 9], "i"), before, 0, 1, MPI.MAX)
        window.Unlock(0)
        assert before.tolist() == [50 * sum(range(size)), 50 * size]
        assert memory.tolist()[:3] == [50 * size, max(9, before[0]), max(9, before[1])]
    assert sorted(comm.allreduce(numbers)) == list(range(50 * size))

    # One rank wins; the others see who.
    memory[:] = -1
    comm.Barrier()
    winner = np.zeros(1, "i")
    window.Lock_all()
    mine = np.array([rank], "i")
    window.Compare_and_swap(mine, np.array([-1], "i"), winner, size - 1, 11)
    window.Flush(size - 1)
    latest = np.zeros(1, "i")
    window.Fetch_and_op(mine, latest, size - 1, 11, MPI.NO_OP)
    window.Unlock_all()
    assert winner[0] == -1 if latest[0] == rank else winner[0] == latest[0]
    assert len(set(comm.allgather(int(latest[0])))) == 1

    # Epochs between neighbours alone; requests.
    group = window.Get_group()
    sources, targets = group.Incl([left]), group.Incl([right])
    window.Post(sources)
    window.Start(targets)
    window.Put(np.array([rank + 30], "i"), right, 3)
    window.Complete()
    assert window.Wait() is True and memory[3] == left + 30
    comm.Barrier()
    window.Lock(right, MPI.LOCK_SHARED)
    window.Rput(np.array([rank + 60], "i"), right, 4).Wait()
    request = window.Rget(got[:1], right, 3)
    request.Wait()
    window.Unlock(right)
    assert got[0] == rank + 30
    comm.Barrier()
    assert memory[4] == left + 60
    fails(lambda window=window: window.Put(np.ones(1, "i"), 0, {}), ValueError)
    fails(lambda window=window: window.Put(np.ones(1, "i"), 0, (0, 1, MPI.INT, 1)), ValueError)
    two = np.zeros(2, "i")
    fails(lambda window=window, two=two: window.Fetch_and_op(two, two, 0), ValueError)
    del memory
    window.Free()
    assert window == MPI.WIN_NULL

comm.Barrier()
print("done", flush=True)
