"""``recv(info=True)`` into an array of a dtype that compiled code knows: it tells what came."""

from __future__ import annotations

import numpy as np
import pytest

from gpucoll import ANY_SOURCE, ANY_TAG
from gpucoll.errors import DeadlineError, MismatchError, PeerLostError

TIMES = 3  # the first goes through Python, and teaches the entry


@pytest.mark.ranks(2)
def test_what_came_is_told(comm):
    x = np.arange(6.0).reshape(2, 3)
    for number in range(TIMES):
        if comm.rank == 0:
            comm.send(x, 1, 3 + number)
            comm.send(x[:1], 1, 3 + number)
            continue
        for source, tag in ((0, 3 + number), (ANY_SOURCE, ANY_TAG)):
            out = np.full(8, -1.0)
            got, message = comm.recv(out, source, tag, info=True, timeout_s=20.0)
            assert got is out
            assert (message.source, message.tag, message.dtype) == (0, 3 + number, "float64")
            assert message.size_bytes == 8 * message.count
            assert message.shape in ((2, 3), (1, 3))
            assert out[: message.count].tolist() == x.ravel()[: message.count].tolist()
            assert (out[message.count :] == -1).all()
            assert message.number is None
    comm.barrier()


@pytest.mark.ranks(2)
def test_numbers_records_and_large_arrays(comm):
    record = np.dtype([("a", "i4"), ("b", "f8")])
    large = np.arange(300_000)
    for _ in range(TIMES):
        if comm.rank == 0:
            comm.send(2.5, 1)
            comm.send(np.ones(3, record), 1)
            comm.send(large, 1)
            continue
        out, message = comm.recv(np.zeros(1), 0, info=True)
        assert (out[0], message.number, message.shape) == (2.5, float, ())
        out, message = comm.recv(np.zeros(4, record), 0, info=True)
        assert (message.count, message.dtype) == (3, str(record))
        assert out["b"].tolist() == [1, 1, 1, 0]
        out, message = comm.recv(np.zeros_like(large), 0, info=True)
        assert np.array_equal(out, large)
        assert message.count == large.size
    comm.barrier()


@pytest.mark.ranks(2)
def test_a_message_that_does_not_fit_stays(comm):
    if comm.rank == 0:
        for _ in range(TIMES):
            comm.send(np.arange(4.0), 1, 1)
        comm.barrier()
        return
    for _ in range(TIMES):
        with pytest.raises(MismatchError, match="rank 1 of 2"):
            comm.recv(np.zeros(3), 0, 1, info=True)
        with pytest.raises(MismatchError):
            comm.recv(np.zeros(4, np.int64), 0, 1, info=True)
        out, message = comm.recv(np.zeros(4), 0, 1, info=True)
        assert out.tolist() == [0, 1, 2, 3]
        assert message.count == 4
    comm.barrier()


def wait_in_vain(comm):
    if comm.rank == 1:
        with pytest.raises((DeadlineError, PeerLostError)):
            comm.recv(np.zeros(1), 0, 9)  # until the other gives up
        return
    for _ in range(TIMES):
        comm.send(np.ones(1), 0, 1)
        comm.recv(np.zeros(1), 0, 1, info=True)
    with pytest.raises(DeadlineError, match="recv"):
        comm.recv(np.zeros(1), 1, 1, info=True, timeout_s=0.2)


def test_a_deadline(ranks):
    ranks.call(2, wait_in_vain)
