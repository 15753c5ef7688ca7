"""What auto does where a vendor's library turns out not to serve, when GPUs are connected."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from tests.calls.gpu.test_connecting import facts_of, ones
from tests.faults.test_ends import errors

from gpucoll import backends
from gpucoll.backends.choice import instead
from gpucoll.backends.nccl import library
from gpucoll.calls.gpu import connection
from gpucoll.collectives import Collective
from gpucoll.errors import BackendUnavailableError

LOAD = backends.load
NCCL_LOAD = library.load
SERVED = ("cpu", "nccl", "rccl", "direct")


class RecordedDirect:
    """In the direct backend's place: it connects, and is divided, and that is all."""

    def __init__(self, was: str) -> None:
        self.was = was
        self.issuer = SimpleNamespace(is_busy=False)

    def describe(self) -> dict[str, str]:
        return {"was": self.was}

    def split(self, channel: Any, color: Any, key: int, timeout_s: Any) -> Any:
        return SimpleNamespace(abort=lambda: None)

    def close(self, limit_s: float) -> None:
        self.was = "closed"

    give_up = note_abort = close


def connect(group, channel, calls, name, number, timeout_s, wish):
    channel.all_gather_bytes(b"", Collective.CONNECT, timeout_s=timeout_s)  # all ranks are here
    return RecordedDirect(f"{name} on GPU {number}")


MODULE = SimpleNamespace(connect=connect, adopt=lambda *a, exits: RecordedDirect("adopted"))


@contextlib.contextmanager
def with_direct() -> Iterator[None]:
    """Let there be a direct backend in this process."""

    def load(name: str, **options: Any) -> Any:
        return MODULE if name == "direct" else LOAD(name, **options)

    with (
        patch.object(backends, "load", load),
        patch.object(connection, "instead", partial(instead, served=SERVED)),
    ):
        yield


def share_a_gpu(rank):
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gpucoll")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with with_direct(), rank.init(device=3) as comm:
            part = comm.split(comm.rank % 2)
            shown = facts_of(comm), facts_of(part)
            part.close()
            return *shown, logged
    finally:
        logger.removeHandler(handler)


def test_ranks_that_share_a_gpu_are_served_by_direct(gpus):
    for rank, (facts, part, logged) in enumerate(gpus.call_ranks(3, share_a_gpu)):
        text = facts["GPU arrays"]
        assert text.startswith("backend direct: chosen by auto when the GPUs connected: NCCL ")
        assert "ranks 0, 1, 2 share one GPU" in text
        assert facts["was"] == "direct on GPU 3"
        assert (part["GPU arrays"], part["was"]) == (text, "adopted")
        assert [line.split(":")[0] for line in logged] == [f"rank {rank}"]
        assert "share one GPU" in logged[0]


def miss_the_library(rank, backend):
    def load(name: str) -> Any:
        if rank.rank == 1:
            raise BackendUnavailableError("no libnccl.so.2 here")
        return NCCL_LOAD(name)

    with (
        patch.object(library, "load", load),
        with_direct(),
        rank.init(device=rank.rank, backend=backend) as comm,
    ):
        return facts_of(comm)


def test_no_library_on_one_rank(gpus):
    for facts in gpus.call_ranks(2, miss_the_library, "auto"):
        assert "rank 1: no libnccl.so.2 here" in facts["GPU arrays"]
        assert facts["was"].startswith("direct on GPU ")


def test_a_library_that_was_asked_for_by_name_is_not_gone_round(gpus):
    for error in errors(gpus.replies(2, miss_the_library, "nccl")):
        assert type(error) is BackendUnavailableError
        assert "NCCL cannot connect these ranks: rank 1: no libnccl.so.2 here" in str(error)


def fail_to_join(rank):
    if rank.rank == 0:
        rank.control.fail_at(1, 2, "ncclCommInitRankConfig")
    try:
        with with_direct(), rank.init() as comm, pytest.raises(BackendUnavailableError) as caught:
            comm.all_reduce(ones(rank.kit))
        return str(caught.value)
    finally:
        rank.control.fail_at(0, 0)


def test_a_library_that_fails_while_joining_is_an_error(gpus):
    """What has broken is to be mended, not gone round."""
    for text in gpus.call_ranks(2, fail_to_join):
        assert "rank 0: ncclCommInitRankConfig" in text
