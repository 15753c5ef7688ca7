"""Published: versions are whole, in order, and there whatever readers do; on one host."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, namedtuple
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
from tests.waiting import until

from gpucoll import ArgumentError, DeadlineError, MismatchError, SharedMemoryError, StateError
from gpucoll.tables import Published, board

Pair = namedtuple("Pair", "first second")


def filled(version, size=5):
    return np.full(size, version, np.int64)


def published(comm, size=5, source=0):
    return Published(comm, filled(0, size), source)


# --- structures, arguments ------------------------------------------------------------------------

LIKES = [
    np.zeros((2, 3), np.float32),
    np.zeros(()),
    np.zeros(0),
    [np.zeros(3, np.complex64), np.zeros((2, 2), bool)],
    (np.zeros(3, np.int8), np.zeros(3, np.float16)),
    Pair(np.zeros(3), {"b": np.zeros(1), "a": [np.zeros(2)]}),
    OrderedDict(w=np.zeros((3, 2), order="F"), b=np.zeros(6)[::2]),
    np.zeros(2, [("x", "<i2"), ("y", "<f8")]),
]


def bytes_of(tree):
    """Return the kinds and bytes of arrays in their structure."""
    if isinstance(tree, dict):
        return {key: bytes_of(each) for key, each in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree), [bytes_of(each) for each in tree]
    return tree.dtype, tree.shape, tree.tobytes()


def random_like(tree, draw):
    if isinstance(tree, dict):
        return {key: random_like(tree[key], draw) for key in sorted(tree, reverse=True)}
    if isinstance(tree, list | tuple):
        items = [random_like(each, draw) for each in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    made = np.empty_like(tree)
    made[...] = draw.integers(0, 2, tree.shape)
    return made


@pytest.mark.ranks(3)
@pytest.mark.parametrize("like", LIKES, ids=range(len(LIKES)))
def test_what_is_published_is_what_is_read(comm, like):
    draw = np.random.default_rng(0)
    first, second = random_like(like, draw), random_like(like, draw)
    with Published(comm, like, source=1) as shared:
        assert shared.latest() == (0, None)
        assert (shared.version, shared.is_source) == (0, comm.rank == 1)
        comm.barrier()
        if comm.rank == 1:
            assert shared.publish(first) == 1
        version, found = shared.latest(wait=True)
        assert (version, bytes_of(found)) == (1, bytes_of(like_of(first, like)))
        assert shared.latest(newer_than=1) == (1, None)
        assert shared.latest(newer_than=0)[0] == 1
        comm.barrier()
        if comm.rank == 1:
            assert shared.publish(second) == 2
        again = shared.latest(1, out=found, wait=True)
        assert again[0] == shared.version == 2
        assert again[1] is found
        assert bytes_of(found) == bytes_of(like_of(second, like))
        untouched = shared.latest(2, out=found)
        assert untouched == (2, None)
        comm.barrier()


def like_of(tree, like):
    """Return a tree whose dicts have the order of `like`."""
    if isinstance(like, dict):
        return {key: like_of(tree[key], like[key]) for key in like}
    if isinstance(like, list | tuple):
        items = [like_of(each, model) for each, model in zip(tree, like, strict=True)]
        return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)
    return tree


@pytest.mark.ranks(2)
def test_what_is_read_belongs_to_the_reader(comm):
    with published(comm) as shared:
        if comm.rank == 0:
            given = filled(1)
            shared.publish(given)
            given[:] = 7
        _, mine = shared.latest(wait=True)
        mine[:] = 9
        comm.barrier()
        assert (shared.latest()[1] == 1).all()
        comm.barrier()


BAD = [
    (lambda comm: {"like": "abc"}, "like must be an array of NumPy, CuPy, PyTorch or JAX; got str"),
    (lambda comm: {"like": [filled(0), 3.0]}, r"like\[1\] must be an array .*; got float"),
    (lambda comm: {"like": {"a": []}}, "like has no array"),
    (lambda comm: {"like": np.array([None])}, "array of Python objects"),
    (lambda comm: {"like": filled(0), "source": 2}, "source is 2; there are ranks 0 to 1"),
    (lambda comm: {"like": filled(0), "source": 0.0}, r"source must be a rank, an int; got 0\.0"),
    (lambda comm: {"like": filled(0), "source": 1}, "source is rank 0 on rank 0 and rank 1 on"),
    (
        lambda comm: {"like": filled(0, 6)},
        r"array is int64 of shape \(5,\) on rank 0 of 2, but .*6",
    ),
    (lambda comm: {"like": [filled(0)]}, "array is int64 .* on rank 0 of 2, but not there"),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("given", "text"), BAD, ids=[text for _, text in BAD])
def test_bad_input_on_one_rank_is_an_error_on_all(comm, given, text):
    arguments = given(comm) if comm.rank == 1 else {"like": filled(0)}
    with pytest.raises((ArgumentError, TypeError, MismatchError), match=text):
        Published(comm, **arguments)
    comm.barrier()


def test_a_communicator_is_needed():
    with pytest.raises(TypeError, match=r"must be a gpucoll\.Communicator; got int"):
        Published(cast(Any, 3), filled(0))


@pytest.mark.ranks(2)
def test_bad_arguments_of_calls(comm):
    with Published(comm, {"a": filled(0), "b": [np.zeros(2)]}) as shared:
        if comm.rank == 0:
            for given, text in [
                (filled(0), r"arrays\['a'\] is missing|arrays is not in like"),
                ({"a": filled(0), "b": []}, r"arrays\['b'\]\[0\] is missing"),
                ({"a": filled(0), "b": [np.zeros(2)], "c": filled(0)}, r"arrays\['c'\] is not in"),
                ({"a": filled(0), "b": [np.zeros(3)]}, r"\['b'\]\[0\] must be float64 of shape"),
                (
                    {"a": filled(0) * 1.0, "b": [np.zeros(2)]},
                    r"\['a'\] must be int64 .*; got float",
                ),
                (
                    {"a": np.ma.zeros(5, np.int64), "b": [np.zeros(2)]},
                    r"arrays\['a'\] is a masked array: its mask would be ignored",
                ),
                ({"a": 3, "b": [np.zeros(2)]}, r"arrays\['a'\] must be an array .*; got int"),
            ]:
                with pytest.raises((ArgumentError, TypeError), match=text):
                    shared.publish(given)
            assert shared.version == 0
            shared.publish({"a": filled(1), "b": [np.ones(2)]})
        else:
            with pytest.raises(StateError, match="rank 1 of 2: only the source, rank 0, may"):
                shared.publish({"a": filled(0), "b": [np.zeros(2)]})
        locked = np.zeros(2)
        locked.flags.writeable = False
        for given, text in [
            ({"newer_than": "1"}, "newer_than must be a version, an int; got '1'"),
            ({"timeout_s": -1, "wait": True}, "timeout_s must be positive"),
            ({"out": {"a": filled(0), "b": [locked]}}, r"out\['b'\]\[0\] cannot be written"),
            ({"out": filled(0)}, "out"),
        ]:
            with pytest.raises((ArgumentError, TypeError), match=text):
                shared.latest(**cast(Any, given))
        comm.barrier()
    for call in (shared.latest, lambda: shared.latest(3), lambda: shared.version):
        with pytest.raises(StateError, match=f"Published on rank {comm.rank} of 2 is closed"):
            call()
    assert repr(shared) == f"<Published from rank 0 on rank {comm.rank} of 2: closed>"
    shared.close()


@pytest.mark.ranks(1)
def test_a_forked_child_reads_nothing_and_closes_nothing(comm):
    with published(comm) as shared:
        shared.publish(filled(1))
        child = os.fork()
        if child == 0:
            try:
                with pytest.raises(StateError, match="belongs to the process that has forked"):
                    shared.latest()
                with pytest.raises(StateError, match="belongs to the process that has forked"):
                    shared.publish(filled(2))
                with pytest.raises(StateError, match="belongs to the process that has forked"):
                    shared.latest(1, wait=True, timeout_s=1)
                shared._lock.acquire()  # as if a thread of the parent had held it
                with pytest.raises(StateError, match="belongs to the process that has forked"):
                    shared.latest()
                shared.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert shared.publish(filled(2)) == 2


@pytest.mark.ranks(1)
def test_a_version_newer_than_a_negative_number(comm):
    with published(comm) as shared:
        assert shared.latest(newer_than=-1) == (0, None)
        with pytest.raises(DeadlineError, match="no version newer than 0 came within 0"):
            shared.latest(newer_than=-1, wait=True, timeout_s=0.01)
        shared.publish(filled(1))
        assert shared.latest(newer_than=-1, wait=True)[0] == 1
        assert shared.latest(newer_than=np.int64(1)) == (1, None)


@pytest.mark.ranks(1)
def test_a_list_in_the_place_of_a_dict_with_numbers(comm):
    arrays = [filled(number) for number in range(11)]
    with Published(comm, dict(enumerate(arrays))) as shared:
        shared.publish(arrays)
        found = shared.latest()[1]
        assert [found[number][0] for number in range(11)] == [*range(11)]


@pytest.mark.ranks(1)
def test_a_lack_of_memory_is_an_error_of_publish(comm):
    with published(comm) as shared:
        shared.publish(filled(1))
        refused = OSError(28, "No space left on device")
        with (
            mock.patch.object(os, "posix_fallocate", side_effect=refused),
            pytest.raises(SharedMemoryError, match=r"64 bytes were refused \(No space left"),
        ):
            shared.publish(filled(2))
        assert shared.latest()[0] == 1
        assert shared.publish(filled(2)) == 2


# --- versions are whole ---------------------------------------------------------------------------


def publish_until(shared, others, size):
    """Publish as fast as possible until the others have called together; return how many."""
    arrays, version = filled(0, size), 0
    while not others.done():
        version += 1
        arrays[:] = version
        assert shared.publish(arrays) == version
    return version


def read(shared, reads, size, seed):
    """Read in several ways; return the number of different versions."""
    draw, found, newest = np.random.default_rng(seed), set(), 0
    out = np.empty(size, np.int64)
    until(lambda: shared.version)
    for _ in range(reads):
        way = int(draw.integers(3))
        version, arrays = shared.latest(out=out) if way else shared.latest()
        assert version >= newest, "a version older than one seen before"
        assert arrays[0] == version
        assert (arrays == version).all(), "a mixture of versions"
        newest = version
        found.add(version)
    return len(found)


def read_while_written(comm, reads, size):
    with published(comm, size) as shared:
        if comm.rank == 0:
            return publish_until(shared, comm.all_reduce(1, async_op=True, timeout_s=600), size)
        found = read(shared, reads, size, comm.rank)
        comm.all_reduce(1, async_op=True, timeout_s=600).wait()
        return found


@pytest.mark.parametrize(("size", "reads"), [(1, 3000), (1000, 2000), (1_000_000, 30)])
def test_a_snapshot_is_one_version(ranks, size, reads):
    written, *found = ranks.call(3, read_while_written, reads, size)
    assert written > 1
    assert all(1 <= different <= written for different in found)


@pytest.mark.soak
@pytest.mark.parametrize(("size", "reads"), [(4, 250_000), (3000, 250_000), (2_000_000, 300)])
def test_a_million_snapshots(ranks, size, reads):
    ranks.call(3, read_while_written, reads, size, limit_s=900)


@pytest.mark.ranks(2)
def test_threads_of_a_rank_may_read_at_the_same_time(comm):
    with published(comm, 20_000) as shared:
        if comm.rank == 0:
            publish_until(shared, comm.all_reduce(1, async_op=True, timeout_s=600), 20_000)
        else:
            failed = []

            def reader(seed):
                try:
                    read(shared, 100, 20_000, seed)
                except BaseException as error:
                    failed.append(error)

            threads = [threading.Thread(target=reader, args=[seed]) for seed in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            comm.all_reduce(1, async_op=True, timeout_s=600).wait()
            assert not failed
        comm.barrier()


@pytest.mark.ranks(1)
def test_there_is_a_free_slot_whatever_is_pinned(comm):
    made = board.Board(comm, 4, 100)
    for version in range(1, 6):
        slot = made.free_slot()
        made.slot(slot)[:] = version
        made.announce(version, slot)
        if version < 5:
            assert made.pin(version - 1) == made.word()
    assert sorted({made.free_slot(), made.word() & board.SLOT_MASK}) == [4, 5]
    kept = [int(made.slot(slot)[0]) for slot in range(4)]
    assert kept == [1, 2, 3, 4]
    made.unpin(2)
    assert made.free_slot() == 2
    made.memory.close()
