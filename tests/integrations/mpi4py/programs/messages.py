"""Messages of arrays and objects between ranks 0 and 1. Runs on mpi4py, too."""

import array

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank = comm.Get_rank()
other = 1 - rank
status = MPI.Status()
if rank > 1:
    comm.Barrier()
    raise SystemExit

# What was sent as one datatype may be received as another; counts are in whose terms one asks.
if rank == 0:
    comm.Send(np.arange(3.0), other, 5)
    comm.Send([np.arange(6, dtype="i"), 4, MPI.INT], other, 6)
    comm.send({"a": [1, 2]}, other, 7)
    comm.Send(array.array("i", [1, 2, 3]), other, 8)
else:
    raw = bytearray(32)
    comm.Recv(raw, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
    assert (status.source, status.tag, status.Get_count(MPI.DOUBLE), status.count) == (0, 5, 3, 24)
    assert np.frombuffer(raw, "d")[:3].tolist() == [0, 1, 2]
    comm.Probe(0, 6, status)
    assert (status.Get_count(MPI.INT), status.Get_elements(MPI.INT)) == (4, 4)
    into = np.zeros((2, 4), "i")
    comm.Recv([into, (4, 4), MPI.INT], 0, 6)
    assert into.tolist() == [[0] * 4, [0, 1, 2, 3]]
    message = comm.mprobe(0, 7, status)
    assert not comm.iprobe(0, 7)
    assert message.recv() == {"a": [1, 2]}
    ints = array.array("i", [0] * 3)
    comm.Recv(ints, 0, 8)
    assert ints.tolist() == [1, 2, 3]

# Over all tags in the order in which they were sent, small and large.
lengths = [10, 200_000, 3, 2_000_000]
if rank == 0:
    requests = [comm.Isend(np.full(n, n % 256, "u1"), other, tag) for tag, n in enumerate(lengths)]
    MPI.Request.Waitall(requests)
else:
    for tag, n in enumerate(lengths):
        out = np.empty(max(lengths), "u1")
        comm.Recv(out, 0, MPI.ANY_TAG, status)
        assert (status.tag, status.count, out[0]) == (tag, n, n % 256)

# A message that is too large is an error, and lost, as in MPI.
if rank == 0:
    comm.Send(np.ones(4), other, 1)
    comm.Send(np.ones(1), other, 1)
else:
    small = np.zeros(2)
    try:
        comm.Recv(small, 0, 1)
    except MPI.Exception as error:
        assert error.Get_error_class() == MPI.ERR_TRUNCATE
    comm.Recv(small, 0, 1)
    assert small.tolist()[0] == 1

# Both at once, in one buffer, to nobody, prepared.
data = np.full(3, rank)
comm.Sendrecv_replace(data, other, 0, other, 0, status)
assert data.tolist() == [other] * 3 and status.source == other
got = np.empty(3, int)
comm.Sendrecv(np.full(3, rank), other, 1, got, other, 1)
assert got.tolist() == [other] * 3
comm.Send(got, MPI.PROC_NULL)
comm.Recv(got, MPI.PROC_NULL, status=status)
assert (status.source, status.tag, status.count) == (MPI.PROC_NULL, MPI.ANY_TAG, 0)
assert got.tolist() == [other] * 3
assert comm.sendrecv([rank], other, source=other) == [other]
edge, ghost = np.zeros(2), np.zeros(2)
both = [comm.Recv_init(ghost, other, 3), comm.Send_init(edge, other, 3)]
for step in range(3):
    edge[:] = 10 * step + rank
    MPI.Prequest.Startall(both)
    MPI.Request.Waitall(both)
    assert ghost.tolist() == [10 * step + other] * 2

# Waiting for one, some; asking.
if rank == 0:
    requests = [comm.irecv(source=1, tag=n) for n in range(3)]
    comm.send("go", 1, 9)
    seen = {}
    while len(seen) < 3:
        place, value = MPI.Request.waitany(requests, status)
        seen[place] = value
        assert status.tag == place
    assert seen == {0: "a", 1: "b", 2: "c"}
    assert MPI.Request.Waitany(requests) == MPI.UNDEFINED
    assert MPI.Request.Waitsome(requests) is None
else:
    assert not comm.Iprobe(0, 1)
    assert comm.recv(source=0, tag=9) == "go"
    for n in (2, 0, 1):
        comm.ssend("abc"[n], 0, n)
request = comm.Issend(np.ones(1), other, 4)
if rank == 0:
    assert not request.Test()
    comm.Send(np.ones(1), other, 8)
else:
    comm.Recv(np.empty(1), other, 8)
comm.Recv(np.empty(1), other, 4)
request.Wait()
MPI.Attach_buffer(bytearray(4096))
comm.Bsend(np.ones(1), other, 11)
comm.Recv(np.empty(1), other, 11)
assert len(MPI.Detach_buffer()) == 4096

# A receive that nothing has come for is taken back, and takes no later message; others go on.
kept = np.zeros(2)
requests = [comm.Irecv(np.zeros(2), other, 12), comm.irecv(source=other, tag=13)]
requests += [comm.Irecv(kept, other, 12), comm.Recv_init(np.zeros(2), MPI.ANY_SOURCE, 14)]
requests[3].Start()
comm.Barrier()
for request in (requests[0], requests[1], requests[3]):
    request.Cancel()
    request.Cancel()
    assert request != MPI.REQUEST_NULL and request.Get_status(status) and status.Is_cancelled()
comm.Barrier()
comm.Send(np.full(2, 1.0 * rank), other, 12)
requests[2].Wait(status)
assert not status.cancelled and status.count == 16 and kept.tolist() == [other] * 2
requests[2] = comm.Isend(np.ones(1), other, 15)
requests[2].Cancel()  # it is sent already
statuses = [MPI.Status() for _ in requests]
assert MPI.Request.waitall(requests, statuses)[1] is None
assert [item.cancelled for item in statuses[:3]] == [True, True, False]
assert requests[:2] == [MPI.REQUEST_NULL] * 2
comm.Recv(np.zeros(1), other, 15)
requests[3].Free()
done = comm.Irecv(np.zeros(1), MPI.PROC_NULL)
done.Cancel()
done.Wait(status)
assert not status.cancelled
comm.Barrier()
print("done", flush=True)
