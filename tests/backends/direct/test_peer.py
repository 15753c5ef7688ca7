"""Collectives through memory that ranks' GPUs share, over the drivers' doubles."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from typing import Any

import ml_dtypes  # noqa: F401  (makes np.dtype("bfloat16") known)
import numpy as np
import pytest
from tests import oracle
from tests.ranks import Ended

from gpucoll import devices
from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.direct import peer, peer_memory, peer_trial
from gpucoll.backends.direct.peer import PeerPath
from gpucoll.backends.direct.rounds import Word, value_of
from gpucoll.backends.protocol import Request
from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentTypeError, BackendError, BackendUnavailableError, GpucollError
from gpucoll.types import ReduceOp

HALF_BYTES = 1024
LIMIT_S = 20.0


@pytest.fixture(params=["nccl", "rccl"])
def double(request, doubles):
    made = doubles.double(request.param)
    if made.rtc is None:
        pytest.skip("no C++ compiler (g++, clang++) for the double of the kernels' compiler")
    return made


@pytest.fixture
def on_ranks(gpu_ranks, double):
    """Return what calls ``function(Peers, *args)`` on ranks, on one GPU or on GPUs of their own."""

    def call(world_size, function, *args, shares=True):
        return gpu_ranks.call(
            world_size,
            inside,
            double,
            function,
            args,
            shares,
            gives="seat",
            environment=double.variables,
        )

    return call


def inside(seat, double, function, args, shares):
    control = double.load()
    device = devices.open_device(double.kind, 1 if shares else seat.rank)
    before, before_bytes = left_over(control), control.count("memory")
    with seat.init() as comm:
        peers = Peers(device, control, comm)
        result = function(peers, *args)
        peers.free()
        assert control.count("memory") <= before_bytes, "GPU memory was left behind"
        assert left_over(control) == before, "streams or events were left behind"
        return result


def left_over(control):
    return control.count("streams"), control.count("events")


class Peers:
    """A rank with a GPU of the double, and arrays on it."""

    def __init__(self, device: Any, control: Any, comm: Any) -> None:
        self.device, self.control, self.comm = device, control, comm
        self.rank, self.world_size = comm.rank, comm.world_size
        self._arrays: list[int] = []

    def connect(self) -> PeerPath:
        gather = self.comm.all_gather_object
        made = peer_memory.connect(self.device, self.rank, self.world_size, gather, HALF_BYTES)
        return PeerPath(made)

    def array(self, x: np.ndarray) -> Buffer:
        """Return a copy of an array on the GPU."""
        address = self.device.allocate(x.nbytes + 64)
        self._arrays.append(address)
        made = Buffer(address, x.shape, x.dtype.name, x.dtype.itemsize, None, self.device.label)
        if x.size:
            self.read(made)[...] = x
        return made

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Buffer:
        return self.array(np.full(shape, 77).astype(dtype))

    def read(self, buffer: Buffer) -> np.ndarray:
        kind: Any = ctypes.c_char * (buffer.size_bytes + 64)
        found = np.frombuffer(kind.from_address(buffer.address), np.uint8)[: buffer.size_bytes]
        return found.view(np.dtype(buffer.dtype)).reshape(buffer.shape)

    def free(self) -> None:
        for address in self._arrays:
            self.device.free(address)
        self._arrays.clear()


def given(world_size: int, shape: tuple[int, ...], dtype: str, seed: int) -> list[np.ndarray]:
    """Return the inputs of all ranks."""
    numbers = np.random.default_rng(seed)
    made = [numbers.integers(-20, 20, shape) for _ in range(world_size)]
    return [(x / 7 if np.dtype(dtype).kind not in "iu" else x).astype(dtype) for x in made]


def every_call(peers, is_slow):
    """Enqueue many calls, on two streams in turn, with no wait between them; then look."""
    device, n, rank = peers.device, peers.world_size, peers.rank
    path = peers.connect()
    if is_slow and rank == n - 1:
        peers.control.driver_set("delay_us", 300)
    streams = [device.create_stream(), device.create_stream()]
    expected: list[tuple[str, Buffer, np.ndarray]] = []

    def enqueue(what, request, out, results):
        launch = path.prepare(request)
        assert launch is not None
        with device:
            path.enqueue(launch, streams[len(expected) % 2])
        if results[rank] is not None:
            expected.append((what, out, results[rank]))

    for seed, (dtype, op) in enumerate(
        [("float32", "sum"), ("int32", "max"), ("bfloat16", "avg"), ("float64", "prod")]
    ):
        for count in (0, 1, 37, 1000):
            what, root = f"{dtype} {op} {count}", seed % n
            xs = given(n, (count,), dtype, seed)
            blocks = given(n, (n * count,), dtype, seed)
            rows = [(place * 3 + seed) % 5 * (count // 8) for place in range(n)]
            parsed = ReduceOp.parse(op)

            x, out = peers.array(xs[rank]), peers.empty((count,), dtype)
            request = Request(Collective.ALL_REDUCE, x, out, op=parsed)
            enqueue(f"all_reduce {what}", request, out, oracle.all_reduce(xs, op))

            x = peers.array(xs[rank])
            request = Request(Collective.ALL_REDUCE, x, x, op=parsed)
            enqueue(f"all_reduce in place {what}", request, x, oracle.all_reduce(xs, op))

            x, out = peers.array(xs[rank]), peers.empty((count,), dtype)
            given_out = out if rank == root else None
            request = Request(Collective.REDUCE, x, given_out, op=parsed, root=root)
            enqueue(f"reduce {what}", request, out, oracle.reduce(xs, op, root))

            x = peers.array(xs[rank])
            request = Request(Collective.BROADCAST, x, x, root=root)
            enqueue(f"broadcast {what}", request, x, oracle.broadcast(xs, root))

            x, out = peers.array(xs[rank]), peers.empty((n * count,), dtype)
            request = Request(Collective.ALL_GATHER, x, out)
            enqueue(f"all_gather {what}", request, out, oracle.all_gather(xs))

            ragged = [y[:k] for y, k in zip(blocks, rows, strict=True)]
            x, out = peers.array(ragged[rank]), peers.empty((sum(rows),), dtype)
            request = Request(Collective.ALL_GATHER, x, out, counts=tuple(rows))
            enqueue(f"all_gather by counts {what}", request, out, oracle.all_gather(ragged))

            x, out = peers.array(xs[rank]), peers.empty((n * count,), dtype)
            given_out = out if rank == root else None
            request = Request(Collective.GATHER, x, given_out, root=root)
            enqueue(f"gather {what}", request, out, oracle.gather(xs, root))

            x, out = peers.array(blocks[rank]), peers.empty((count,), dtype)
            given_in = x if rank == root else None
            request = Request(Collective.SCATTER, given_in, out, root=root)
            enqueue(f"scatter {what}", request, out, oracle.scatter(blocks, root))

            x, out = peers.array(blocks[rank]), peers.empty((n * count,), dtype)
            request = Request(Collective.ALL_TO_ALL, x, out)
            enqueue(f"all_to_all {what}", request, out, oracle.all_to_all(blocks))

            x, out = peers.array(blocks[rank]), peers.empty((count,), dtype)
            request = Request(Collective.REDUCE_SCATTER, x, out, op=parsed)
            enqueue(f"reduce_scatter {what}", request, out, oracle.reduce_scatter(blocks, op))

            x, out = peers.array(xs[rank]), peers.empty((count,), dtype)
            request = Request(Collective.SCAN, x, out, op=parsed)
            enqueue(f"scan {what}", request, out, oracle.scan(xs, op))

            if op != "avg":
                x, out = peers.array(xs[rank]), peers.empty((count,), dtype)
                request = Request(Collective.EXCLUSIVE_SCAN, x, out, op=parsed)
                enqueue(f"exclusive_scan {what}", request, out, oracle.exclusive_scan(xs, op))
    with device:
        for stream in streams:
            device.synchronize_stream(stream)
    wrong = [
        what
        for what, out, result in expected
        if peers.read(out).tobytes() != np.ascontiguousarray(result).tobytes()
    ]
    path.close(LIMIT_S)
    for stream in streams:
        device.destroy_stream(stream)
    return wrong


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize(
    ("double", "shares", "world_size"),
    [
        pytest.param(("nccl", "rccl")[(world_size + shares) % 2], shares, world_size)
        for world_size in (1, 2, 3, 4)
        for shares in (True, False)
    ],
    indirect=["double"],
)
def test_every_call(on_ranks, world_size, shares):
    assert on_ranks(world_size, every_call, shares, shares=shares) == [[]] * world_size


def two_turns(peers, count):
    """Reduce an array that is above the threshold of one turn, and a list of arrays."""
    path, n = peers.connect(), peers.world_size
    xs = given(n, (count,), "float32", 1)
    ys = given(n, (5,), "float32", 2)
    stream = peers.device.create_stream()
    x, y = peers.array(xs[peers.rank]), peers.array(ys[peers.rank])
    x_out, y_out = (peers.empty(each.shape, "float32") for each in (x, y))
    op = ReduceOp.parse("sum")
    request = Request(Collective.ALL_REDUCE_LIST, x, None, op=op, parts=((x, x_out), (y, y_out)))
    launch = path.prepare(request)
    with peers.device:
        path.enqueue(launch, stream)
        path.enqueue(launch, stream)  # a launch may be used again
        peers.device.synchronize_stream(stream)
    found = peers.read(x_out).tobytes(), peers.read(y_out).tobytes()
    path.close(LIMIT_S)
    peers.device.destroy_stream(stream)
    return found == (oracle.all_reduce(xs)[0].tobytes(), oracle.all_reduce(ys)[0].tobytes())


@pytest.mark.soak(quick=1)
def test_two_turns(on_ranks):
    count = peer.ONE_SHOT_BYTES // 4 + 3
    assert on_ranks(3, two_turns, count) == [True] * 3


# --- what the driver sees -------------------------------------------------------------------------


def calls_of_a_reduction(peers):
    path = peers.connect()
    x, out = peers.array(np.ones(5, np.float32)), peers.empty((5,), "float32")
    launch = path.prepare(Request(Collective.ALL_REDUCE, x, out, op=ReduceOp.parse("sum")))
    stream = peers.device.create_stream()
    with peers.device:
        path.enqueue(launch, stream)
        with peers.control.driver_calls() as calls:
            path.enqueue(launch, stream)
        peers.device.synchronize_stream(stream)
    memory = path.memory
    places = {
        memory.exchange.addresses[peers.rank]: "my half",
        x.address: "x",
        stream: "stream",
        memory.word(peers.rank, Word.READY): "my ready",
        memory.word(peers.rank, Word.DONE): "my done",
        memory.word(1 - peers.rank, Word.READY): "its ready",
        memory.word(1 - peers.rank, Word.DONE): "its done",
    }
    path.close(LIMIT_S)
    peers.device.destroy_stream(stream)
    return [(name, [places.get(number, number) for number in numbers]) for name, numbers in calls]


def test_calls_of_a_reduction(on_ranks, double):
    is_cuda = double.kind == "cuda"
    wait, write = "cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2"
    copy, launch = "cuMemcpyAsync", "cuLaunchKernel"
    at_least, kind = [0], []
    if not is_cuda:
        wait, write = "hipStreamWaitValue32", "hipStreamWriteValue32"
        copy, launch = "hipMemcpyAsync", "hipModuleLaunchKernel"
        at_least, kind = [0, 0xFFFFFFFF], [4]
    for calls in on_ranks(2, calls_of_a_reduction):
        names = [name for name, _ in calls]
        assert names[0] == ("cuStreamWaitEvent" if is_cuda else "hipStreamWaitEvent")
        assert names[-1] == ("cuEventRecord" if is_cuda else "hipEventRecord")
        # The first call took two rounds, so that each one begins with the same half.
        assert [call for call in calls[1:-1] if call[0] != launch] == [
            (wait, ["stream", "its done", 2, *at_least]),
            (copy, ["my half", "x", 20, *kind, "stream"]),
            (write, ["stream", "my ready", 5, 0]),
            (wait, ["stream", "its ready", 5, *at_least]),
            (write, ["stream", "my done", 4, 0]),
        ]
        assert names[5] == launch
        assert (calls[5][1][1], calls[5][1][3]) == (1, "stream")  # of one block


# --- what cannot be -------------------------------------------------------------------------------


def connecting_fails(peers, setting, value):
    known = vars(peers.device)
    if peers.rank == 1:
        peers.control.driver_set(setting, value)
        known.pop("can_wait_for_values", None)  # what an earlier test has asked for
    with pytest.raises(BackendUnavailableError) as error:
        peers.connect()
    if peers.rank == 1:
        known.pop("can_wait_for_values", None)
        peers.control.driver_set(setting, 1 if setting in ("peers", "wait_values") else 0)
    path = peers.connect()  # nothing is left that stands against it
    path.close(LIMIT_S)
    return str(error.value)


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("export_error", 801, "cannot be exported"),
        ("private", 1, "cannot be exported"),
        ("open_error", 205, "cannot open another process's memory"),
        ("register_error", 2, "cannot page-lock 4096 bytes"),
        ("peers", 0, "does not read the memory of rank 0's GPU"),
        ("peers", 2, "does not read what rank 0's GPU has written"),
        ("peers", 3, "does not read what rank 0's GPU has written"),
        ("memory", 1000, "bytes are free"),
    ],
)
def test_connecting_fails(on_ranks, setting, value, reason):
    if setting == "memory":
        messages = on_ranks(3, no_memory)
    else:
        messages = on_ranks(3, connecting_fails, setting, value, shares=False)
    assert len(set(messages)) == 1
    assert messages[0].startswith("rank 1: ")
    assert reason in messages[0]


def does_not_come_back(peers):
    """Rank 1's GPU does nothing more: all ranks are told, and what it works with is not freed."""
    before = peers.control.count("memory")
    if peers.rank == 1:
        peers.control.driver_set("hold", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_trial, "LIMIT_S", 0.2)
        with pytest.raises(BackendUnavailableError) as error:
            peers.connect()
    left = peers.control.count("memory") - before
    for trial, _, own, _ in peer_memory._stuck:  # as if the GPU had come back
        peers.control.driver_set("hold", 0)
        peers.device.synchronize()
        trial.is_stuck = False
        trial.close()
        peers.device.free(own)
    peer_memory._stuck.clear()
    return str(error.value), left > 0


def test_a_gpu_that_does_not_come_back(on_ranks):
    (message, left), (same, left_by_1) = on_ranks(2, does_not_come_back, shares=False)
    assert message == same
    assert "rank 1: " in message
    assert "is not done after 0.2 s" in message
    assert (left, left_by_1) == (False, True)


def no_memory(peers):
    total = peers.device.memory_bytes()[1]
    if peers.rank == 1:
        peers.control.driver_set("memory", 1000)
    with pytest.raises(BackendUnavailableError) as error:
        peers.connect()
    peers.control.driver_set("memory", total)
    return str(error.value)


def test_streams_that_cannot_wait(on_ranks, double):
    if double.kind == "cuda":
        pytest.skip("CUDA's streams can, since 11.7")
    (message, _) = on_ranks(2, connecting_fails, "wait_values", 0)
    assert message == "rank 1: streams of rocm:1 cannot wait for words"


def others(peers):
    """What goes another way, is refused, or is too much."""
    path = peers.connect()
    x = peers.array(np.ones(4, np.float32))
    counts = Request(Collective.ALL_TO_ALL, x, x, counts=(2, 2), receive_counts=(2, 2))
    own = Request(
        Collective.ALL_REDUCE, x, x, op=ReduceOp.custom(lambda a, b: a + b, commutative=True)
    )
    answers = [path.prepare(counts), path.prepare(own)]
    averaged = Request(Collective.EXCLUSIVE_SCAN, x, x, op=ReduceOp.parse("avg"))
    with pytest.raises(ArgumentTypeError, match="avg has no identity"):
        path.prepare(averaged)
    path.close(LIMIT_S)
    return answers


def test_what_goes_another_way(on_ranks):
    assert on_ranks(2, others) == [[None, None]] * 2


def many_rounds(peers):
    path = peers.connect()
    path._before = peer.MOST_UNSIGNED_ROUNDS - 2
    if peers.device.kind == "cuda":
        path._before = (1 << 31) - 4
    for word in Word:
        path.memory.raise_words(word, value_of(word, 0, path._before))
    peers.comm.barrier()
    stream = peers.device.create_stream()
    x = peers.array(np.full(3, peers.rank + 1, np.float32))
    launch = path.prepare(Request(Collective.ALL_REDUCE, x, x, op=ReduceOp.parse("sum")))
    problems = []
    with peers.device:
        for _ in range(4):
            try:
                path.enqueue(launch, stream)
            except BackendError as error:
                problems.append(str(error))
        peers.device.synchronize_stream(stream)
    found = peers.read(x).tolist()
    path.close(LIMIT_S)
    peers.device.destroy_stream(stream)
    return found, len(problems)


def test_numbers_wrap_or_end(on_ranks, double):
    # CUDA compares differences; HIP numbers, so that there is a last one.
    result = ([24.0] * 3, 0) if double.kind == "cuda" else ([3.0] * 3, 3)
    assert on_ranks(2, many_rounds) == [result] * 2


# --- giving up ------------------------------------------------------------------------------------


def one_is_missing(peers):
    """Rank 1 takes no part; the others' streams are ended."""
    path, device = peers.connect(), peers.device
    streams = [device.create_stream() for _ in range(2)]
    x = peers.array(np.ones(2000, np.float32))
    launch = path.prepare(Request(Collective.ALL_REDUCE, x, x, op=ReduceOp.parse("sum")))
    peers.comm.barrier()
    over, waiting = None, False
    if peers.rank != 1:
        with device:
            for stream in streams:
                path.enqueue(launch, stream)
            waiting = not any(device.is_stream_done(stream) for stream in streams)
    peers.comm.barrier()  # one rank's abort lets the others' streams go, too
    if peers.rank != 1:
        assert waiting
        with device:
            over = path.abort(LIMIT_S)
            for stream in streams:
                device.synchronize_stream(stream)
            with pytest.raises(BackendError, match="shared GPU memory was given up"):
                path.enqueue(launch, streams[0])
            assert path.give_up(LIMIT_S)
    else:
        path.close(LIMIT_S)
    for stream in streams:
        device.destroy_stream(stream)
    return over


def test_abort_ends_waiting_streams(on_ranks):
    assert on_ranks(3, one_is_missing) == [True, None, True]


def one_is_killed(seat, double):
    """Rank 1 is killed in the middle of a call; its memory can still be read, and nobody hangs."""
    control = double.load()
    device = devices.open_device(double.kind, seat.rank)
    with contextlib.suppress(GpucollError), seat.init() as comm:
        peers = Peers(device, control, comm)
        path, stream = peers.connect(), device.create_stream()
        x = peers.array(np.ones(2000, np.float32))
        launch = path.prepare(Request(Collective.ALL_REDUCE, x, x, op=ReduceOp.parse("sum")))
        assert launch is not None
        comm.barrier()
        if seat.rank == 1:
            with control.held(), device:
                path.enqueue(launch, stream)
                os.kill(os.getpid(), signal.SIGKILL)
        with device:
            path.enqueue(launch, stream)
            has_ended = path.give_up(0.2), path.give_up(0.2)
            device.synchronize_stream(stream)
        device.destroy_stream(stream)
        peers.free()
        comm.abort()
    # Rank 1 has never said that it reads this memory no more, but it is gone.
    return has_ended, control.count("memory")


def test_a_rank_is_killed(rank_server, double):
    with rank_server.fork(3) as pool:
        pool.start(one_is_killed, double, gives="seat", environment=double.variables)
        first, killed, last = pool.collect()

    assert isinstance(killed, Ended)
    for reply in (first, last):
        assert reply.error is None, reply.trace
        assert reply.result == ((True, True), 0)


def stuck(peers):
    """A stream that cannot go on keeps what it uses: nothing is taken from under it."""
    path, device = peers.connect(), peers.device
    stream = device.create_stream()
    x = peers.array(np.ones(20, np.float32))
    launch = path.prepare(Request(Collective.ALL_REDUCE, x, x, op=ReduceOp.parse("sum")))
    with device:
        device.synchronize_stream(path._stream)
    with device, peers.control.held():
        path.enqueue(launch, stream)
        answers = [path.give_up(0.01), bool(path.memory.exchange.addresses[peers.rank])]
    answers.append(path.give_up(LIMIT_S))
    device.destroy_stream(stream)
    # Who was through before the other one let go has left its memory: it is looked at again here.
    peers.comm.barrier()
    peers.connect().close(LIMIT_S)
    return answers


def test_a_stream_that_is_stuck_keeps_its_memory(on_ranks):
    assert on_ranks(2, stuck) == [[False, True, True]] * 2


def late_to_close(peers):
    """Who closes before the others have let go leaves its memory where it is; it is freed later."""
    memory = peers.connect().memory
    before = peers.control.count("memory")
    answer, own_bytes = None, 2 * HALF_BYTES
    if peers.rank == 0:
        answer = memory.close(0.0), peers.control.count("memory") == before
    peers.comm.barrier()
    if peers.rank == 1:
        answer = memory.close(LIMIT_S), peers.control.count("memory") <= before - own_bytes
    peers.comm.barrier()
    peers.connect().close(LIMIT_S)  # where what was left is looked at again
    return answer


def test_memory_stays_while_others_read_it(on_ranks):
    assert on_ranks(2, late_to_close) == [(False, True), (True, True)]
