"""``init(direct_schedule="ring")``: calls go around a ring, through the drivers' doubles."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from tests import oracle
from tests.calls.gpu.cases import run_cases
from tests.calls.gpu.conftest import Gpus, vendors_in_turn, with_communicator
from tests.calls.gpu.test_deterministic import guarded, inputs_of
from tests.calls.gpu.test_direct import cases_of, on_one_gpu
from tests.collective_cases import REDUCTIONS
from tests.dtypes import assert_same
from tests.ranks import Reply
from tests.waiting import until

import gpucoll
from gpucoll.backends.direct import peer, peer_memory, peer_trial, ring
from gpucoll.errors import (
    AbortedError,
    ArgumentError,
    BackendUnavailableError,
    DeadlineError,
    GpucollError,
    RendezvousError,
)

RING = {"backend": "direct", "direct_schedule": "ring"}
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")


def noting(function, name, made):
    def call(*args, **options):
        made.append(name)
        return function(*args, **options)

    return call


@contextlib.contextmanager
def small_arrays_go_around():
    """Small arrays go around, too, in several laps and chunks; yields the calls that did."""
    made: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer, "ONE_SHOT_BYTES", 16)
        patch.setattr(ring, "LEAST_CHUNK_BYTES", 64)
        for name in ("HALF_BYTES", "HOST_HALF_BYTES"):
            patch.setattr(peer_memory, name, 2048)
        for name in COLLECTIVES:
            kept = getattr(ring, name)
            patch.setattr(ring, name, noting(kept, name, made))
        yield made


def cases(rank, drawn, options):
    with small_arrays_go_around() as made:
        return with_communicator(rank, options, run_cases, (drawn,)), sorted(set(made))


def drawn_cases(world_size):
    names = [*REDUCTIONS, "all_gather"]
    return [case for name in names for case in cases_of(name, world_size)]


@pytest.mark.soak(quick=1)
@vendors_in_turn("world_size", [2, 3, 4])
def test_drawn_cases(gpus, world_size):
    drawn = drawn_cases(world_size)
    expected = [(len(drawn), sorted(COLLECTIVES))] * world_size
    assert gpus.call_ranks(world_size, cases, drawn, RING) == expected


@pytest.mark.soak
def test_ranks_that_share_a_gpu(gpus):
    drawn, options = drawn_cases(3), {**RING, "device": 0}
    shared = Gpus(gpus.pools, gpus.double, on_one_gpu)
    assert shared.call_ranks(3, cases, drawn, options) == [(len(drawn), sorted(COLLECTIVES))] * 3


def in_order(rank):
    """With rank order, sums of floats are made of shares; integers and blocks still go around."""
    kit = rank.kit
    with small_arrays_go_around() as made, rank.init(**RING, deterministic="order") as comm:
        inputs = inputs_of(comm.world_size, 6000)
        x = guarded(kit, inputs[comm.rank])
        assert_same(kit.read(comm.all_reduce(x.array)), oracle.all_reduce(inputs)[0], "float32")
        assert made == []
        comm.all_reduce(guarded(kit, np.arange(50, dtype=np.int32)).array)
        comm.all_gather(x.array)
    return sorted(set(made))


def test_deterministic(gpus):
    assert gpus.call_ranks(3, in_order) == [["all_gather", "all_reduce"]] * 3


def same_bits(rank):
    """A ring of floats has the same bits on every rank, though not those of rank order."""
    kit = rank.kit
    with small_arrays_go_around(), rank.init(**RING) as comm:
        inputs = inputs_of(comm.world_size, 6000, "float16")
        got = kit.read(comm.all_reduce(guarded(kit, inputs[comm.rank]).array, "avg"))
        facts = comm.describe().facts
    exact = np.mean([x.astype(np.float64) for x in inputs], axis=0)
    # Three roundings of partial sums that are at most the sum of all magnitudes.
    bound = 3 * 2.0**-11 * np.sum([np.abs(x.astype(np.float64)) for x in inputs], axis=0)
    assert (np.abs(got - exact) <= bound).all()
    return got.tobytes(), facts["GPU schedule"], facts["GPU: same bits as the CPU backend"]


def test_same_bits_on_every_rank(gpus):
    said = gpus.call_ranks(3, same_bits)
    assert len(set(said)) == 1
    assert said[0][1:] == (
        "ring of ranks 0, 1, 2: asked for",
        "yes, of up to 16 bytes, and of what a ring does not serve",
    )


def average(rank):
    """An average within float16's range, though the sum is not."""
    with small_arrays_go_around() as made, rank.init(**RING) as comm:
        x = guarded(rank.kit, np.full(999, 40000, np.float16))
        got = rank.kit.read(comm.all_reduce(x.array, "avg"))
        return set(got.tolist()), made


def test_averages_of_narrow_types_are_made_of_shares(gpus):
    assert gpus.call_ranks(3, average) == [({40000.0}, [])] * 3


def first_call(rank, schedule):
    """Rank 1 does not come; the streams of the others are full, so that the driver blocks them."""
    with small_arrays_go_around():
        rank.control.driver_set("queue", 20)
        try:
            with rank.init(**{**RING, "direct_schedule": schedule}, timeout_s=20) as comm:
                x = guarded(rank.kit, np.ones(100_000, np.float32))
                comm.barrier()
                if rank.rank != 1:
                    try:
                        comm.all_reduce(x.array, timeout_s=0.5)
                        comm.check()
                    except GpucollError as error:
                        return type(error)
                with pytest.raises(GpucollError):
                    until(comm.check)
        finally:
            rank.control.driver_set("queue", 0)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("schedule", ["ring", "shares"])
def test_a_first_call_that_fills_the_stream_ends(gpus, schedule):
    first, _, last = gpus.call_ranks(3, first_call, schedule)
    assert {first, last} <= {DeadlineError, AbortedError}


# --- what cannot be -------------------------------------------------------------------------------


def connecting(rank, given, options):
    rank.init(**{**RING, **options, "direct_schedule": given[rank.rank]}).close()


@pytest.mark.parametrize(
    ("given", "options", "error", "text"),
    [
        (["ring", "shares"], {}, RendezvousError, "direct_schedule"),
        (
            ["ring"] * 2,
            {"mixed": True},
            BackendUnavailableError,
            "other ranks may pass host arrays",
        ),
    ],
)
def test_what_cannot_be(gpus, given, options, error, text):
    for reply in gpus.replies(2, connecting, given, options):
        assert isinstance(reply, Reply)
        assert isinstance(reply.error, error), reply
        assert text in str(reply.error)


def broken_link(rank):
    """GPUs read each other's memory, but rank 1's GPU writes nothing there."""
    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == 1:
            kept = peer_trial.PeerTrial.write
            write = lambda self, address: kept(self, self._scratch)  # noqa: E731
            patch.setattr(
                peer_memory.PeerMemory, "write_to_next", lambda self: write(self._trial, 0).hex()
            )
        rank.init(**RING).close()


def test_a_link_that_does_not_write(gpus):
    for reply in gpus.replies(3, broken_link):
        assert isinstance(reply, Reply)
        assert isinstance(reply.error, BackendUnavailableError), reply
        assert "does not find what rank 1's GPU has written" in str(reply.error)


def test_a_schedule_that_does_not_exist(monkeypatch):
    with pytest.raises(
        ArgumentError, match="direct_schedule must be auto, shares or ring; got 'x'"
    ):
        gpucoll.init(direct_schedule="x")
    monkeypatch.setenv("GPUCOLL_DIRECT_SCHEDULE", "rings")
    with pytest.raises(ArgumentError, match="GPUCOLL_DIRECT_SCHEDULE must be auto, shares or ring"):
        gpucoll.init()
