"""What programs take for granted of mpi4py beside its calls. Runs on mpi4py, too."""

import array

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size


def fails(call, kind):
    try:
        call()
    except kind:
        return
    raise AssertionError(f"nothing was raised, but {kind} was expected")


# MPI.buffer: bytes that take the bytes of whatever has some.
memory = MPI.Alloc_mem(8)
memory[:] = b"abcdefgh"
assert memory.tobytes() == b"abcdefgh" and bytes(memory[2:4]) == b"cd"
assert type(memory[0]) is int and memory[0] + memory[1] + memory[7] == 97 + 98 + 104
assert list(memory) == list(b"abcdefgh") and memory and not MPI.buffer()
memory[4:] = array.array("i", [-1])
assert bytes(memory) == b"abcd\xff\xff\xff\xff"
memory[:4] = 0
memory[7] = 5
assert np.frombuffer(memory, "u1").tolist() == [0, 0, 0, 0, 255, 255, 255, 5]
fails(lambda: memory.__setitem__(slice(None), b"short"), ValueError)
fails(lambda: memory.__setitem__(slice(None), array.array("q", [0] * 8)), ValueError)
fails(lambda: memory.__setitem__(0, 256), OverflowError)
fails(lambda: MPI.buffer(b"read-only").__setitem__(slice(None), 0), TypeError)
MPI.Free_mem(memory)


# A function of the program gets such buffers.
def larger(inbuf, inoutbuf, datatype):
    assert isinstance(inbuf, MPI.buffer) and isinstance(inoutbuf, MPI.buffer)
    assert datatype == MPI.INT and inbuf.nbytes == inoutbuf.nbytes == 12
    a, b = array.array("i", inbuf.tobytes()), array.array("i", inoutbuf.tobytes())
    inoutbuf[:] = array.array("i", map(max, a, b))


op = MPI.Op.Create(larger, commute=True)
out = np.zeros(3, "i")
comm.Allreduce(np.array([rank, -rank, 7], "i"), out, op)
assert out.tolist() == [size - 1, 0, 7]
op.Free()

# A buffer for buffered sends comes back when it is detached.
for owner in (MPI, comm):
    attached = bytearray(4096)
    owner.Attach_buffer(attached)
    assert owner.Detach_buffer() is attached

# A subarray begins where its array does, whatever its type's lower bound.
for base in (MPI.INT.Create_hindexed([3], [16]), MPI.INT.Create_resized(-4, 12)):
    part = base.Create_subarray([3], [2], [1])
    assert part.Get_extent() == (0, 36)
    assert part.Get_true_extent()[0] == 12 + base.Get_true_extent()[0]
    column = MPI.INT.Create_subarray([3, 3], [3, 1], [0, 1]).Create_subarray([2], [1], [1])
    assert column.Get_extent() == (0, 72) and column.Get_true_extent() == (40, 28)

# A logical operation on one rank's value alone copies it; on more it gives 0 or 1.
for op in (MPI.LAND, MPI.LOR, MPI.LXOR):
    x, one = np.array([0, 5, -3], "i"), [0, 5, -3]
    truth = [0, 1, 1] if op != MPI.LXOR or size % 2 else [0, 0, 0]
    for call in ("Allreduce", "Reduce", "Iallreduce", "Reduce_scatter_block"):
        sent = np.tile(x, size) if "scatter" in call else x
        out = np.full(3, 9, "i")
        request = getattr(comm, call)(sent, out, op=op)
        if request is not None:
            request.Wait()
        expected = one if size == 1 else truth
        assert out.tolist() == (expected if rank == 0 or call != "Reduce" else [9] * 3), call
    out = x.copy()
    comm.Allreduce(MPI.IN_PLACE, out, op)
    assert out.tolist() == (one if size == 1 else truth)
    comm.Scan(x, out, op)
    upto = [0, 1, 1] if op != MPI.LXOR or rank % 2 == 0 else [0, 0, 0]
    assert out.tolist() == (one if rank == 0 else upto)
    out = np.full(3, 9, "i")
    comm.Exscan(x, out, op)
    before = [0, 1, 1] if op != MPI.LXOR or rank % 2 else [0, 0, 0]
    assert out.tolist() == ([9] * 3 if rank == 0 else one if rank == 1 else before)

# Ranks, tags and sizes may be any numbers; what is after the point is cut. Counts are whole.
x, out = np.arange(3.0), np.zeros(3)
for zero in (0.0, np.float64(0.9), np.int8(0), False):
    requests = comm.Irecv(out, rank + zero, 1.0), comm.Isend(x, rank + zero, 1 + zero)
    MPI.Request.Waitall(requests)
    assert comm.sendrecv("x", rank + zero, zero, None, rank + zero, zero) == "x"
    comm.Bcast(x, zero)
    assert comm.bcast(rank, zero) == 0
    assert comm.gather(rank, zero) == (list(range(size)) if rank == 0 else None)
    comm.Reduce(x, out, root=zero)
    assert not comm.Iprobe(zero, 5.0)
part = comm.Split(0.5, size - float(rank))
assert part.rank == size - 1 - rank
part.Free()
assert MPI.Compute_dims(4.0, 2) == [2, 2]
assert len(MPI.Alloc_mem(3.0)) == 3
fails(lambda: comm.Send([x, 1.0], rank), TypeError)
for wrong in ("0", None, 1j):
    fails(lambda wrong=wrong: comm.Isend(x, wrong), TypeError)
    fails(lambda wrong=wrong: comm.bcast(x, wrong), TypeError)

comm.Barrier()
print("done", flush=True)
