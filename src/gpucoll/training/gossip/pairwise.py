"""Averages of two ranks at a time, at each rank's own pace (AD-PSGD): nobody waits for anybody.

A rank offers a partner a copy of its array, and goes on. When the partner comes to its own `step`,
it moves its array half of the way to that copy, and answers with the change. The first rank, at its
next `step`, makes the opposite change, whatever it has done to its array meanwhile. So the sum of
the two arrays stays what it was, and no step waits: not for an answer, so that three ranks that
average in a circle cannot block each other, and not for a partner that is stopped.

If two ranks offer to each other at the same time, both offers are the same average: each rank has
both arrays as they were offered, makes its half of the change, and sends no answer.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

from gpucoll import (
    ArgumentError,
    ArgumentTypeError,
    Communicator,
    DeadlineError,
    MessageWork,
    MismatchError,
    StateError,
)
from gpucoll.training.gossip.exchange import (
    FLOATS,
    INTEGERS,
    agreed,
    copied,
    describe,
    plain,
    rank_of,
    stored,
)
from gpucoll.training.gossip.topology import Topology

__all__ = ["PairwiseAverage"]

CALL = "PairwiseAverage"
OFFER, ANSWER = 1, 2
"""Tags, on a communicator of its own."""
FOR_EVER_S = 1_000_000.0
"""Deadline of the messages: a partner may be stopped for as long as it likes."""
LOOK_S = 0.001
CLOSE_S = 0.1


class _Offer(NamedTuple):
    """An average that this rank has offered and whose answer has not come."""

    step: int
    x: Any
    sent: MessageWork[Any]
    answer: MessageWork[Any]


class PairwiseAverage:
    """Averages of this rank's array with one partner's at a time, without waiting.

    >>> with PairwiseAverage(comm, x) as average:
    ...     for batch in batches:
    ...         x = average.step(x - lr * gradient(x, batch))
    ...     x = average.finish(x)

    Parameters
    ----------
    comm : Communicator
        Collective: all ranks make the object together. It has a communicator of its own.
    like : array
        What `step` will get: a host array of this shape and dtype, float, complex or a signed
        integer.
    topology : Topology, optional
        Who may average with whom: those that are linked in any round. Default: everybody with
        everybody. Its weights do not matter.
    patience : int
        How many steps a rank makes without offering anything while a partner owes it an answer.
        From then on it offers to others, and leaves this partner out until the answer comes.
        A stopped rank costs the others no more than that.
    seed : int
        Of the random choice of partners, which differs on every rank.

    Raises
    ------
    ArgumentError, ArgumentTypeError, MismatchError
        An argument is invalid, or the ranks differ in shape, dtype or topology. Every rank raises
        one of these errors.

    Notes
    -----
    Cost of an average: n bytes each way. Memory: an array for each offer and each answer under way,
    at most two for each partner.

    A pair's sum is conserved to the last bit for integers, whose differences must fit into their
    dtype, and for floats to the rounding of two additions. If a rank is lost, `step` raises
    `PeerLostError`: `shrink` the communicator and make a new object. Averages that were under way
    are lost then, between survivors, too.
    """

    def __init__(
        self,
        comm: Communicator,
        like: Any,
        *,
        topology: Topology | None = None,
        patience: int = 8,
        seed: int = 0,
    ) -> None:
        problem = _problem_of(comm, like, topology, patience)
        detail = "" if topology is None else f", topology {getattr(topology, 'digest', '')}"
        self._description = describe(CALL, like, (*FLOATS, *INTEGERS), detail)
        agreed(comm, self._description, problem, None)
        others = [rank for rank in range(comm.world_size) if rank != comm.rank]
        self._partners = others if topology is None else topology.partners(comm.rank)
        self._comm = comm.duplicate()
        self._patience, self._random = patience, np.random.default_rng([seed, comm.rank])
        self._offers: dict[int, _Offer] = {}
        self._coming: dict[int, MessageWork[Any]] = {}
        self._answers: dict[int, MessageWork[Any]] = {}
        self._is_finished = False
        self.steps = 0
        """Number of steps made."""
        self.averages = 0
        """Number of averages in which this rank's array has changed."""

    @property
    def unanswered(self) -> tuple[int, ...]:
        """The ranks that owe this rank an answer: they are slow, or stopped."""
        return tuple(self._offers)

    def step(self, x: Any, *, out: Any = None) -> Any:
        """Make the averages whose messages have come, and offer one; return the new x.

        Never waits. If nothing has come the result is x itself.

        Parameters
        ----------
        x : array
            This rank's array, of the shape and dtype that the object was made for.
        out : array, optional
            Destination, may be x.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            x has another shape or dtype. Nothing has changed.
        PeerLostError
            A rank is gone, or has closed its object without `finish`.
        """
        if self._is_finished:
            raise StateError(f"{CALL} on {rank_of(self._comm)} is finished: make a new one")
        given, x = x, self._checked(x, out)
        self.steps += 1
        x = self._with_what_came(x)
        self._offer(x)
        return self._returned(x, given, out)

    def finish(self, x: Any, *, out: Any = None, timeout_s: float = 10.0) -> Any:
        """Offer nothing more, answer the others until all have finished; return the last x.

        Collective, at each rank's own pace. Afterwards `unanswered` names ranks that were offered
        an average and said nothing for `timeout_s`. The half of it that this rank owes is then
        missing from the sum.

        Parameters
        ----------
        x, out
            See `step`.
        timeout_s : float
            How long to wait for the others, in seconds.
        """
        given, x = x, self._checked(x, out)
        self._is_finished = True
        until_s, all_done = time.monotonic() + timeout_s, None
        while time.monotonic() < until_s:
            if all_done is None and not self._offers:
                all_done = self._comm.all_reduce(np.zeros(1), async_op=True, timeout_s=FOR_EVER_S)
            if all_done is not None and all_done.done():
                all_done.exception()
                break
            x = self._with_what_came(x)
            time.sleep(LOOK_S)
        return self._returned(x, given, out)

    def close(self) -> None:
        """Release the communicator. Call `finish` before, or the others lose this rank."""
        if not self._comm.is_closed:
            pending = [*self._answers.values(), *self._coming.values()]
            for offer in self._offers.values():
                pending += offer.sent, offer.answer
            for work in pending:
                work.withdraw()
            try:
                self._comm.close(timeout_s=CLOSE_S)
            except (DeadlineError, MismatchError):  # to or from a rank that is stopped
                pass

    def __enter__(self) -> PairwiseAverage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, x: Any, out: Any) -> Any:
        mine = describe(CALL, x, (*FLOATS, *INTEGERS), out=out)
        call = f"{CALL} on {rank_of(self._comm)}"
        if mine.problem:
            raise ArgumentTypeError(f"{call}: {mine.problem}")
        if mine[1:3] != self._description[1:3]:
            raise ArgumentError(f"{call} was made for {self._description}; got {mine}")
        return plain(x)

    def _returned(self, x: Any, given: Any, out: Any) -> Any:
        return given if out is None and x is plain(given) else stored(x, given, out)

    def _with_what_came(self, x: Any) -> Any:
        """Return x after the averages whose messages have come."""
        self._comm.check()
        for rank, offer in [*self._offers.items()]:
            if offer.answer.done():
                x = x - offer.answer.wait()
                del self._offers[rank]
                self.averages += 1
        for rank in self._partners:
            if rank not in self._coming and self._comm.probe(rank, OFFER, wait=False) is not None:
                self._coming[rank] = self._receive(rank, OFFER, x)
        for rank, work in [*self._coming.items()]:
            before = self._answers.get(rank)
            if not work.done() or (before is not None and not before.done()):
                continue
            mine = self._offers.get(rank)
            if mine is None:
                change = self._half(work.wait() - x)
                self._answers[rank] = self._send(rank, ANSWER, change)
            elif mine.answer.withdraw():  # no answer came before this offer: the two have crossed
                is_lower = self._comm.rank < rank  # integers: both halve the same difference
                change = self._half((work.wait() - mine.x) if is_lower else (mine.x - work.wait()))
                change = change if is_lower else -change
                self._answers[rank] = mine.sent
                del self._offers[rank]
            else:
                continue
            x = x + change
            del self._coming[rank]
            self.averages += 1
        return x

    def _offer(self, x: Any) -> None:
        """Offer an average to a partner who owes no answer, unless a fresh offer is under way."""
        if any(self.steps - offer.step <= self._patience for offer in self._offers.values()):
            return
        free = [r for r in self._partners if r not in self._offers and r not in self._coming]
        if free:
            partner = free[int(self._random.integers(len(free)))]
            given, answer = copied(x), self._receive(partner, ANSWER, x)
            sent = self._send(partner, OFFER, given)
            self._offers[partner] = _Offer(self.steps, given, sent, answer)

    def _half(self, x: Any) -> Any:
        return stored(x // 2 if self._description.dtype in INTEGERS else x / 2, x, None)

    def _send(self, rank: int, tag: int, x: Any) -> MessageWork[Any]:
        how: Any = {"async_op": True, "timeout_s": FOR_EVER_S}
        work: MessageWork[Any] = self._comm.send(x, rank, tag, **how)
        return work

    def _receive(self, rank: int, tag: int, like: Any) -> MessageWork[Any]:
        how: Any = {"like": like, "async_op": True, "timeout_s": FOR_EVER_S}
        work: MessageWork[Any] = self._comm.recv(source=rank, tag=tag, **how)
        return work


def _problem_of(comm: Communicator, like: Any, topology: object, patience: object) -> str:
    """Return what is wrong with this rank's arguments, or an empty string."""
    if hasattr(like, "__cuda_array_interface__"):
        return "x lies on a GPU: average a copy on the host"
    if topology is not None and not isinstance(topology, Topology):
        return f"topology must be one of gossip.topology; got {type(topology).__name__}"
    if isinstance(topology, Topology) and topology.world_size != comm.world_size:
        return f"the topology is of {topology.world_size} ranks"
    if not isinstance(patience, int) or patience < 0:
        return f"patience must be an int from 0 up; got {patience!r}"
    return ""
