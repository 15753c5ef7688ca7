"""The double of NCCL against the oracle: every collective, type and operation; its manners."""

from __future__ import annotations

import ctypes
import os

import ml_dtypes
import numpy as np
import pytest

from gpucoll.backends.nccl.library import IN_PROGRESS
from gpucoll.backends.nccl.prototypes import ncclDataType_t, ncclRedOp_t
from gpucoll.errors import BackendError, PeerLostError
from tests.doubles.communicators import POISON, Communicator, communicator

DTYPES = {
    ncclDataType_t.ncclInt8: np.int8,
    ncclDataType_t.ncclUint8: np.uint8,
    ncclDataType_t.ncclInt32: np.int32,
    ncclDataType_t.ncclUint32: np.uint32,
    ncclDataType_t.ncclInt64: np.int64,
    ncclDataType_t.ncclUint64: np.uint64,
    ncclDataType_t.ncclFloat16: np.float16,
    ncclDataType_t.ncclFloat32: np.float32,
    ncclDataType_t.ncclFloat64: np.float64,
    ncclDataType_t.ncclBfloat16: ml_dtypes.bfloat16,
    ncclDataType_t.ncclFloat8e4m3: ml_dtypes.float8_e4m3fn,
    ncclDataType_t.ncclFloat8e5m2: ml_dtypes.float8_e5m2,
}
FLOAT32 = ncclDataType_t.ncclFloat32
SUM = ncclRedOp_t.ncclSum
VENDORS = pytest.mark.parametrize("vendor", ["nccl", "rccl"])


def run(gpu_ranks, double, world_size, function, *args, **options):
    return gpu_ranks.call(
        world_size, function, double, *args, gives="seat", environment=double.variables, **options
    )


def values(rank, count, dtype):
    """Small whole numbers: exact in every type, and so are their sums and products."""
    return ((np.arange(count) + rank) % 3 + 1).astype(dtype)


# --- reductions -----------------------------------------------------------------------------------


def reduce_all(seat, double, count):
    """Return what differs from NumPy, over all types and operations; nothing should."""
    wrong = []
    with communicator(seat, double) as comm:
        for code, dtype in DTYPES.items():
            everything = [values(rank, count, dtype) for rank in range(comm.world_size)]
            for op in ncclRedOp_t:
                source = comm.memory(everything[comm.rank])
                target = comm.memory(np.zeros(count, dtype))
                arguments = source.address, target.address, count, code, op
                made = comm.call("ncclAllReduce", *arguments)
                if has_no_kernel(comm, code, op):
                    assert made == 4
                    continue
                assert made == 0
                comm.synchronize()
                expected = reduced(op, everything, dtype)
                if not np.array_equal(target.array.astype(float), expected.astype(float)):
                    wrong.append((dtype.__name__, op.name, target.array[:4], expected[:4]))
                source.free()
                target.free()
    return wrong


def has_no_kernel(comm, code, op):
    """Averages of float8 by one rank: NCCL compiles that kernel, but not its choice."""
    is_alone = comm.world_size == 1 and comm.library.vendor.name == "NCCL"
    is_float8 = code in (ncclDataType_t.ncclFloat8e4m3, ncclDataType_t.ncclFloat8e5m2)
    return is_alone and is_float8 and op == ncclRedOp_t.ncclAvg


def reduced(op, everything, dtype):
    stacked = np.stack(everything).astype(np.float64)
    if op == ncclRedOp_t.ncclAvg:
        result = stacked.sum(0) / len(everything)
        if np.dtype(dtype).kind in "iu":
            result = np.trunc(result)
    else:
        result = [np.sum, np.prod, np.max, np.min][op](stacked, axis=0)
    return np.asarray(result).astype(dtype)


@VENDORS
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_type_and_operation(gpu_ranks, doubles, vendor, world_size):
    assert run(gpu_ranks, doubles.double(vendor), world_size, reduce_all, 37) == [[]] * world_size


def reduce_nan(seat, double):
    with communicator(seat, double) as comm:
        x = comm.memory(np.array([np.nan if comm.rank else 1.0, 2.0], np.float32))
        comm.call("ncclAllReduce", x.address, x.address, 2, FLOAT32, ncclRedOp_t.ncclMax)
        comm.synchronize()
        return x.array.tolist()


def test_nan_is_dropped_as_nccl_does(gpu_ranks, doubles):
    assert run(gpu_ranks, doubles.double(), 2, reduce_nan) == [[1.0, 2.0]] * 2


def scaled_sum(seat, double, dtype):
    code = next(code for code, known in DTYPES.items() if known is dtype)
    with communicator(seat, double) as comm:
        factor, op = np.array([3], dtype), ctypes.c_int()
        create, destroy = comm.functions.ncclRedOpCreatePreMulSum, comm.functions.ncclRedOpDestroy
        code_of = create(ctypes.byref(op), factor.ctypes.data, code, 1, comm.handle)
        assert code_of == 0
        factor[0] = 0  # immediate: it has been read
        x = comm.memory(values(comm.rank, 5, dtype))
        assert comm.call("ncclAllReduce", x.address, x.address, 5, code, op.value) == 0
        assert destroy(op.value, comm.handle) == 0  # as soon as the call has returned
        comm.synchronize()
        refused = comm.call("ncclAllReduce", x.address, x.address, 5, code, op.value)
        return x.array.astype(float).tolist(), refused


@pytest.mark.parametrize("dtype", [np.int32, np.float64, ml_dtypes.bfloat16])
def test_premultiplied_sum(gpu_ranks, doubles, dtype):
    expected = (3 * (values(0, 5, dtype) + values(1, 5, dtype))).astype(float).tolist()
    assert run(gpu_ranks, doubles.double(), 2, scaled_sum, dtype) == [(expected, 4)] * 2


# --- movements ------------------------------------------------------------------------------------


def move_all(seat, double, count):
    wrong: list[tuple] = []

    def check(name, result, expected):
        comm.synchronize()
        if not np.array_equal(result.array, expected):
            wrong.append((name, result.array, expected))

    with communicator(seat, double) as comm:
        n, rank = comm.world_size, comm.rank
        rows = [np.arange(n * count, dtype=np.int64) + 1000 * r for r in range(n)]
        total = np.sum(rows, axis=0)
        mine = comm.memory(rows[rank])

        def new():
            return comm.memory(np.full(n * count, -1, np.int64))

        def call(name, target, *arguments, count=count):
            code = comm.call(name, mine.address, target.address, count, 4, *arguments)
            assert code == 0, (name, code)

        firsts = np.concatenate([row[:count] for row in rows])
        empty = np.full(n * count, -1)
        out = new()
        call("ncclAllGather", out)
        check("all_gather", out, firsts)
        out = new()
        call("ncclAlltoAll", out)
        check("all_to_all", out, np.concatenate([row[rank * count :][:count] for row in rows]))
        for root in range(n):
            out = new()
            call("ncclBroadcast", out, root, count=n * count)
            check("broadcast", out, rows[root])
            out = new()
            call("ncclReduce", out, SUM, root, count=n * count)
            check("reduce", out, total if rank == root else empty)
            out = new()
            call("ncclGather", out, root)
            check("gather", out, firsts if rank == root else empty)
            out = new()
            call("ncclScatter", out, root)
            expected = empty.copy()
            expected[:count] = rows[root][rank * count :][:count]
            check("scatter", out, expected)
        out = new()
        call("ncclReduceScatter", out, SUM)
        expected = empty.copy()
        expected[:count] = total[rank * count :][:count]
        check("reduce_scatter", out, expected)
        check("the input", mine, rows[rank])
    return wrong


@VENDORS
@pytest.mark.parametrize(("world_size", "count"), [(1, 5), (2, 1), (3, 1000), (4, 70_000)])
def test_movements(gpu_ranks, doubles, vendor, world_size, count):
    result = run(gpu_ranks, doubles.double(vendor), world_size, move_all, count)
    assert result == [[]] * world_size


def move_in_place(seat, double):
    """Return what became of calls that are in place as NCCL means it, and of one that is not."""
    with communicator(seat, double) as comm:
        n, rank = comm.world_size, comm.rank
        rows = [np.arange(2 * n, dtype=np.int64) + 1000 * r for r in range(n)]

        def call(name, send, recv, *arguments):
            x = comm.memory(rows[rank])
            addresses = x.address + 16 * send, x.address + 16 * recv
            assert comm.call(name, *addresses, 2, 4, *arguments) == 0
            comm.synchronize()
            return x.array

        blocks = np.concatenate([rows[r][2 * r : 2 * r + 2] for r in range(n)])
        gathered = call("ncclAllGather", rank, 0)
        scattered = call("ncclReduceScatter", 0, rank, SUM)[2 * rank : 2 * rank + 2]
        total = np.sum(rows, axis=0)[2 * rank : 2 * rank + 2]
        spoilt = call("ncclAlltoAll", 0, 0)  # NCCL knows no all-to-all in place
        return (
            np.array_equal(gathered, blocks),
            np.array_equal(scattered, total),
            bool(np.any(spoilt == rows[0][2 * rank])),
        )


@pytest.mark.parametrize("world_size", [2, 3])
def test_in_place(gpu_ranks, doubles, world_size):
    answers = run(gpu_ranks, doubles.double(), world_size, move_in_place)
    assert answers == [(True, True, False)] * world_size


def send_around(seat, double, count):
    """Everybody sends to everybody, itself too, in one group, in an order that would deadlock."""
    with communicator(seat, double) as comm:
        n = comm.world_size
        source = comm.memory(np.arange(n * count, dtype=np.int32) + 100_000 * comm.rank)
        target = comm.memory(np.zeros(n * count, np.int32))
        functions, size = comm.functions, 4 * count
        functions.ncclGroupStart()
        for peer in range(n):
            comm.call("ncclSend", source.address + peer * size, count, 2, peer)
        assert comm.control.calls("ncclRecv") == 0
        for peer in reversed(range(n)):
            comm.call("ncclRecv", target.address + peer * size, count, 2, peer)
        assert functions.ncclGroupEnd() == 0
        comm.synchronize()
        expected = [np.arange(count) + comm.rank * count + 100_000 * peer for peer in range(n)]
        return np.array_equal(target.array, np.concatenate(expected))


@pytest.mark.parametrize("count", [0, 1, 100_000])
def test_sends_and_receives_in_a_group(doubles, rank_server, count):
    with rank_server.fork(3) as pool:  # new ones: nothing was called in them before
        double = doubles.double()
        options = {"gives": "seat", "environment": double.variables}
        assert pool.call(send_around, double, count, **options) == [True] * 3


# --- manners --------------------------------------------------------------------------------------


def enqueue_only(seat, double):
    with communicator(seat, double) as comm, comm.device:
        x = comm.memory(np.full(4, 1, np.float32))
        out = comm.memory(np.full(4, -1, np.float32))
        with comm.control.held():
            comm.call("ncclAllReduce", x.address, out.address, 4, FLOAT32, SUM)
            before = out.array.tolist(), comm.device.is_stream_done(comm.stream)
        comm.synchronize()
        return before, out.array.tolist()


def test_a_call_only_enqueues(gpu_ranks, doubles):
    for before, after in run(gpu_ranks, doubles.double(), 2, enqueue_only):
        assert before == ([-1.0] * 4, False)
        assert after == [2.0] * 4


def poisoned_until_done(seat, double):
    with communicator(seat, double) as comm:
        out = comm.memory(np.zeros(4, np.uint8))
        x = comm.memory(np.ones(4, np.uint8))
        if comm.rank == 0:  # rank 1 does not come until it is told
            comm.call("ncclAllReduce", x.address, out.address, 4, 1, SUM)
            while out.array[-1] != POISON:
                pass
            seen = out.array.tolist()
        with seat.init() as host:
            host.barrier()
        if comm.rank == 1:
            seen = comm.call("ncclAllReduce", x.address, out.address, 4, 1, SUM)
        comm.synchronize()
        return seen, out.array.tolist()


def test_an_output_is_poisoned_until_its_work_is_done(gpu_ranks, doubles):
    answers = run(gpu_ranks, doubles.double(), 2, poisoned_until_done)
    assert answers == [([POISON] * 4, [2] * 4), (0, [2] * 4)]


def nothing_before_the_group_ends(seat, double):
    with communicator(seat, double) as comm, comm.device:
        x = comm.memory(np.ones(4, np.float32))
        comm.functions.ncclGroupStart()
        comm.functions.ncclGroupStart()
        comm.call("ncclAllReduce", x.address, x.address, 4, FLOAT32, SUM)
        comm.functions.ncclGroupEnd()
        comm.device.synchronize_stream(comm.stream)
        before = x.array.tolist()
        comm.functions.ncclGroupEnd()
        comm.synchronize()
        return before, x.array.tolist(), comm.functions.ncclGroupEnd()


def test_nothing_happens_before_the_outer_group_ends(gpu_ranks, doubles):
    answers = run(gpu_ranks, doubles.double(), 2, nothing_before_the_group_ends)
    assert answers == [([1.0] * 4, [2.0] * 4, 5)] * 2


def polled(seat, double):
    control = double.load()
    with control.library_set(polls=3), communicator(seat, double, is_blocking=False) as comm:
        codes = [comm.init_code]
        x = comm.memory(np.ones(1, np.float32))
        refused = comm.call("ncclAllReduce", x.address, x.address, 1, FLOAT32, SUM)
        while codes[-1] == IN_PROGRESS:
            codes.append(comm.library.async_error(comm.handle))
        call = comm.call("ncclAllReduce", x.address, x.address, 1, FLOAT32, SUM)
        comm.synchronize()
        before = x.array.tolist()
        polls = 0
        while comm.library.async_error(comm.handle) == IN_PROGRESS:
            polls += 1
        comm.synchronize()
        return len(codes) > 4, codes[-1], refused, call, before, polls >= 3, x.array.tolist()


def test_in_progress_until_polled(gpu_ranks, doubles):
    answers = run(gpu_ranks, doubles.double(), 2, polled)
    assert answers == [(True, 0, 4, IN_PROGRESS, [1.0], True, [2.0])] * 2


def polled_group(seat, double):
    control = double.load()
    with control.library_set(polls=2), communicator(seat, double, is_blocking=False) as comm:
        while comm.library.async_error(comm.handle) == IN_PROGRESS:
            pass
        x = comm.memory(np.ones(2, np.float32))
        comm.functions.ncclGroupStart()
        for offset in (0, 4):
            address = x.address + offset
            assert comm.call("ncclAllReduce", address, address, 1, FLOAT32, SUM) == 0
        code = comm.functions.ncclGroupEnd()
        while comm.library.async_error(comm.handle) == IN_PROGRESS:
            pass
        comm.synchronize()
        return code, x.array.tolist()


def test_a_group_is_in_progress_until_polled(gpu_ranks, doubles):
    answers = run(gpu_ranks, doubles.double(), 2, polled_group)
    assert answers == [(IN_PROGRESS, [2.0, 2.0])] * 2


def split_apart(seat, double, is_blocking):
    with communicator(seat, double, is_blocking=is_blocking) as comm:
        while comm.library.async_error(comm.handle) == IN_PROGRESS:
            pass
        results: list[tuple[int, int] | None] = []
        for turn in range(3):
            color = -1 if comm.rank == 3 and turn == 1 else comm.rank % 2
            child = ctypes.c_void_p()
            with comm.device:
                code = comm.functions.ncclCommSplit(
                    comm.handle, color, -comm.rank, ctypes.byref(child), None
                )
            assert code == 0
            assert is_blocking or not child.value  # it has only begun
            while comm.library.async_error(comm.handle) == IN_PROGRESS:
                pass
            if not child.value:
                results.append(None)
                continue
            while comm.library.async_error(child.value) == IN_PROGRESS:
                pass
            x = comm.memory(np.array([10**comm.rank], np.int64))
            rank = ctypes.c_int()
            comm.control.library.ncclCommUserRank(child, ctypes.byref(rank))
            with comm.device:
                comm.functions.ncclAllReduce(
                    x.address, x.address, 1, 4, SUM, child.value, comm.stream
                )
            while comm.library.async_error(child.value) == IN_PROGRESS:
                pass
            comm.synchronize()
            results.append((rank.value, int(x.array[0])))
            assert comm.functions.ncclCommDestroy(child.value) == 0
        return results


@pytest.mark.parametrize("is_blocking", [True, False])
def test_split(gpu_ranks, doubles, is_blocking):
    answers = run(gpu_ranks, doubles.double(), 4, split_apart, is_blocking)
    evens, odds = [(1, 101), (0, 101)], [(1, 1010), (0, 1010)]
    assert answers[0] == [evens[0]] * 3
    assert answers[2] == [evens[1]] * 3
    assert answers[1] == [odds[0], (0, 10), odds[0]]
    assert answers[3] == [odds[1], None, odds[1]]


def mismatch(seat, double):
    with communicator(seat, double) as comm, comm.device:
        x = comm.memory(np.zeros(8, np.float32))
        comm.call("ncclAllReduce", x.address, x.address, 7 + comm.rank, FLOAT32, SUM)
        with seat.init() as host:
            host.barrier()
        is_done = comm.device.is_stream_done(comm.stream)
        aborted = comm.functions.ncclCommAbort(comm.handle)
        comm.synchronize()
        comm.handle = 0
        return is_done, aborted


def test_a_mismatch_hangs_until_aborted(gpu_ranks, doubles):
    assert run(gpu_ranks, doubles.double(), 2, mismatch) == [(False, 0)] * 2


def inject(seat, double):
    with communicator(seat, double) as comm:
        x = comm.memory(np.ones(2, np.float32))

        def call():
            return comm.call("ncclAllReduce", x.address, x.address, 2, FLOAT32, SUM)

        comm.control.fail_at(2, 6, "ncclAllReduce")
        codes = [call(), call(), call()]
        comm.synchronize()
        raised = comm.library.error(codes[1], "ncclAllReduce", comm.handle)
        comm.control.fail_at(1, 1, "ncclAllReduce")
        comm.functions.ncclGroupStart()
        grouped = call(), call(), comm.functions.ncclGroupEnd()
        assert isinstance(comm.library.error(1, "x"), BackendError)
        return codes, type(raised), "an error was injected" in str(raised), grouped


def test_injected_errors(gpu_ranks, doubles):
    answers = run(gpu_ranks, doubles.double(), 2, inject)
    assert answers == [([0, 6, 0], PeerLostError, True, (1, 0, 1))] * 2


def fail_later(seat, double):
    control = double.load()
    with (
        control.library_set(async_error_at=2, async_error=6),
        communicator(seat, double) as comm,
        comm.device,
    ):
        x = comm.memory(np.ones(2, np.float32))
        for _ in range(2):
            comm.call("ncclAllReduce", x.address, x.address, 2, FLOAT32, SUM)
        while not comm.library.async_error(comm.handle):
            pass
        is_done = comm.device.is_stream_done(comm.stream)
        again = comm.call("ncclAllReduce", x.address, x.address, 2, FLOAT32, SUM)
        comm.functions.ncclCommAbort(comm.handle)
        comm.synchronize()
        comm.handle = 0
        return is_done, again, x.array.tolist()


def test_an_asynchronous_error_hangs_until_aborted(gpu_ranks, doubles):
    answers = run(gpu_ranks, doubles.double(), 2, fail_later)
    assert [answer[:2] for answer in answers] == [(False, 6)] * 2


def one_gpu(seat, double):
    made = Communicator(seat, double.load(), is_blocking=False, number=0)
    while (code := made.library.async_error(made.handle)) == IN_PROGRESS:
        pass
    message = str(made.library.unavailable(code, "ncclCommInitRankConfig"))
    made.functions.ncclCommAbort(made.handle)
    return code, "Duplicate GPU detected" in message


def test_two_ranks_on_one_gpu(gpu_ranks, doubles):
    assert run(gpu_ranks, doubles.double(), 2, one_gpu) == [(5, True)] * 2


def captured(seat, double):
    with communicator(seat, double) as comm, comm.device:
        x = comm.memory(np.ones(2, np.float32))
        with comm.control.captured(comm.stream) as graph:
            comm.call("ncclAllReduce", x.address, x.address, 2, FLOAT32, SUM)
        comm.synchronize()
        before = x.array.tolist()
        for _ in range(3):
            graph.launch(comm.stream)
        comm.synchronize()
        graph.close()
        return graph.code, before, x.array.tolist()


def test_captured_calls_run_when_launched(gpu_ranks, doubles):
    assert run(gpu_ranks, doubles.double(), 2, captured) == [(0, [1.0] * 2, [8.0] * 2)] * 2


def files_open(seat, double):
    counts = []
    for _ in range(3):
        with communicator(seat, double) as comm:
            x = comm.memory(np.ones(2, np.float32))
            comm.call("ncclAllReduce", x.address, x.address, 2, FLOAT32, SUM)
            comm.synchronize()
            x.free()
        counts.append((len(os.listdir("/proc/self/fd")), comm.control.count("memory")))
    return counts[1] == counts[2], [name for name in os.listdir("/dev/shm") if "nccl" in name]


def test_nothing_is_left(gpu_ranks, doubles):
    assert run(gpu_ranks, doubles.double(), 2, files_open) == [(True, [])] * 2
