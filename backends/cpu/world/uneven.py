"""An all_to_all in which each rank knows only its own counts: all exchange them, then the data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpucoll.backends.cpu.world.large_movements import all_to_all
from gpucoll.backends.cpu.world.phases import Phases, flat
from gpucoll.backends.protocol import PreparedCall, Request, RunByPython
from gpucoll.collectives import Collective
from gpucoll.errors import MismatchError
from gpucoll.group.in_one_piece import Deadline, in_one_piece
from gpucoll.wording import rank_of


class UnevenAllToAll(RunByPython):
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

    def run(self, timeout_s: float | None = None) -> None:
        """Run the call; raise the error if it fails."""
        group = self._phases.group
        deadline = Deadline(group.timeout_s if timeout_s is None else timeout_s)
        with in_one_piece(group):
            self._exchange.run(deadline.left_s)
            self._check()
            sizes = (self._tables[:, 0] * self._row_bytes).tolist()
            with self._phases.begun(deadline.left_s) as run:
                all_to_all(run, sizes)

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
