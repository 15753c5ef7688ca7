"""The handle of a communicator, where the library does not come back."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest

from gpucoll.backends.nccl import communicator
from gpucoll.backends.nccl.communicator import NcclCommunicator
from gpucoll.errors import BackendUnavailableError


class Functions:
    """A library whose abort waits for a graph, as NCCL's does."""

    def __init__(self):
        self.graph_is_gone, self.has_ended = threading.Event(), threading.Event()
        self.ncclCommAbort = self.abort
        self.ncclCommFinalize = lambda _: 4  # as of one that is still in progress
        self.ncclCommSplit = lambda *_: 6

    def abort(self, _):
        self.graph_is_gone.wait()
        self.has_ended.set()
        return 0


class Library:
    def __init__(self):
        self.functions = Functions()

    def async_error(self, _):
        return 0

    def unavailable(self, code, what, communicator=0):
        return BackendUnavailableError(f"{what}: code {code}")


class Device(contextlib.nullcontext):
    relaxed_capture = contextlib.nullcontext


def connected(library: Any) -> NcclCommunicator:
    device: Any = Device()
    return NcclCommunicator(library, device, 7)


@pytest.mark.parametrize("is_in_graphs", [True, False])
def test_an_abort_that_does_not_end_is_not_waited_for_without_end(monkeypatch, is_in_graphs):
    """For a graph that lives on, or a GPU that hangs."""
    monkeypatch.setattr(communicator, "_GRAPHS_S" if is_in_graphs else "_ABORT_S", 0.01)
    library = Library()
    made = connected(library)
    made.is_in_graphs = is_in_graphs

    assert made.abort() == is_in_graphs

    assert not made.handle
    assert not library.functions.has_ended.is_set()
    library.functions.graph_is_gone.set()
    assert library.functions.has_ended.wait(20)


def test_without_graphs_an_abort_has_ended_when_it_returns():
    library = Library()
    library.functions.graph_is_gone.set()

    assert connected(library).abort()

    assert library.functions.has_ended.is_set()


def test_what_cannot_be_finalized_is_aborted():
    library = Library()
    library.functions.graph_is_gone.set()

    connected(library).close(lambda: None)

    assert library.functions.has_ended.is_set()


@pytest.mark.parametrize("color", [None, 0])
def test_a_split_that_fails_is_one_kind_of_error_for_whoever_takes_part_or_not(color):
    """What `Connected.split` tells the other ranks of."""
    made = connected(Library())

    with pytest.raises(BackendUnavailableError, match="ncclCommSplit: code 6"):
        made.split(color, 0, lambda: None)


def test_a_child_that_comes_after_its_split_has_failed_is_aborted_with_its_parent():
    library = Library()
    library.functions.graph_is_gone.set()
    aborted: list[int] = []
    library.functions.ncclCommAbort = aborted.append
    made = connected(library)
    with pytest.raises(BackendUnavailableError):
        made.split(0, 0, lambda: None)
    with pytest.raises(BackendUnavailableError):
        made.split(0, 0, lambda: None)

    for number, child in enumerate(made._children):
        child.value = 9 + number  # by a thread of the library's
    made.abort()

    assert aborted == [7, 10, 9]
