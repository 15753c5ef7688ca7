"""An all_to_all in which each rank knows only its own counts: all exchange them, then the data."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from gpucoll.backends.cpu.world.large_movements import all_to_all
from gpucoll.backends.cpu.world.phases import Phases, flat, not_run
from gpucoll.backends.protocol import PreparedCall, Request
from gpucoll.collectives import Collective
from gpucoll.errors import MismatchError
from gpucoll.group.in_one_piece import in_one_piece
from gpucoll.group.protocol import StartedCalls
from gpucoll.wording import rank_of

_LEAST_TIMEOUT_S = 1e-3


class UnevenAllToAll:
    """A prepared all_to_all with counts for both directions.

    Parameters
    ----------
    phases : Phases
        The call.
    prepare : callable
        Prepares the exchange of the counts.
    """

    def __init__(self, phases: Phases, prepare: Callable[[Request], PreparedCall]) -> None:
        self._phases = phases
        request = phases.request
        assert request.counts is not None
        assert request.receive_counts is not None
        self._row_bytes = request.row_count * request.data.item_bytes
        mine = np.array([request.counts, request.receive_counts], np.int64)
        self._tables = np.empty((phases.group.world_size, *mine.shape), np.int64)
        """By rank: the rows that it sends to each rank, and those that it expects from each."""
        self._exchange = prepare(
            Request(Collective.ALL_GATHER, flat(mine), flat(self._tables), part_of=phases.part_of)
        )

    def run_once(self) -> int:
        """Return `Status.NOT_RUN`: Python has a part in the middle of these calls."""
        return not_run()

    def run(self, timeout_s: float | None = None) -> None:
        """Run the call; raise the error if it fails."""
        group = self._phases.group
        limit_s = group.timeout_s if timeout_s is None else timeout_s
        stop = time.monotonic() + limit_s
        with in_one_piece(group):
            self._exchange.run(limit_s)
            self._check()
            sizes = (self._tables[:, 0] * self._row_bytes).tolist()
            with self._phases.begun(max(stop - time.monotonic(), _LEAST_TIMEOUT_S)) as run:
                all_to_all(run, sizes)

    def start(self, started: StartedCalls, timeout_s: float | None) -> int:
        """Return 0: a Python thread runs started calls."""
        return 0

    def _check(self) -> None:
        """Raise, on every rank, MismatchError if a rank does not send what another one expects."""
        sent, expected = self._tables[:, 0], self._tables[:, 1].T
        differing = np.argwhere(sent != expected)
        if not len(differing):
            return
        sender, receiver = differing[0].tolist()
        group = self._phases.group
        raise MismatchError(
            f"the ranks did not make the same call: rank {sender} sends {sent[sender, receiver]} "
            f"rows to rank {receiver}, which expects {expected[sender, receiver]}, in all_to_all "
            f"with send_counts and recv_counts. This is {rank_of(group.rank, group.world_size)}. "
            "Nothing was written; send_counts and recv_counts must agree between each two ranks. "
            "The communicator stays usable"
        )
