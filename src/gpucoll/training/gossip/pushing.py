"""Push-sum: each rank gives parts of its mass (x, w) away, and x / w comes to the mean."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any, NamedTuple

from gpucoll import ArgumentError, Communicator
from gpucoll.training.gossip.exchange import (
    FLOATS,
    INTEGERS,
    agreed,
    copied,
    describe,
    exchange,
    plain,
    problem_of_number,
    problem_of_ranks,
    stored,
)

__all__ = ["PushSum", "push_sum"]

CALL = "push_sum"
ARRAYS = 2**31 - 13
"""Tag of the messages, on the caller's communicator."""


def push_sum(
    comm: Communicator,
    x: Any,
    w: float,
    to: int | Iterable[int],
    *,
    out: Any = None,
    timeout_s: float | None = None,
) -> tuple[Any, float]:
    """Divide (x, w) equally among this rank and those in `to`; return what this rank has then.

    Collective: all ranks exchange a small message. Arrays go to the ranks in `to` alone. `PushSum`
    makes many steps, through losses.

    Parameters
    ----------
    comm : Communicator
    x : array
        The same shape and dtype on all ranks: float, complex or a signed integer.
    w : float or int
        This rank's weight: 1.0 at first, or a large int if the weights are to stay ints.
    to : int or iterable of int
        Other ranks, each once. They may differ on every rank and in every call.
    out : array, optional
        Destination of the new x, may be x. Default: a new array.
    timeout_s : float, optional
        Deadline of each wait, in seconds. Default: the communicator's.

    Returns
    -------
    (array, float or int)
        The new x and w. Over all ranks, the sum of x and that of w are what they were: to the last
        bit for integers, which are divided with the remainder left to the giver, and for floats as
        long as no division or addition is rounded.

    Raises
    ------
    ArgumentError, ArgumentTypeError, MismatchError
        The arguments of a rank are invalid, or differ in shape or dtype. Every rank raises one of
        these errors, and nothing was moved.
    DeadlineError, PeerLostError
        A rank is late or gone. x and w are as before if `out` is not x.
    """
    x, weights = _push(comm, x, w, to, out, timeout_s)
    return x, weights[comm.rank]


class _State(NamedTuple):
    """What a rank knows after some steps: its x, and the weights of all ranks."""

    steps: int
    x: Any
    weights: tuple[float, ...]


class PushSum:
    """Push-sum over many steps, which goes on after a loss and names the mass of the dead.

    >>> state = PushSum(comm, x)
    >>> try:
    ...     state.push(to=(comm.rank + 1) % comm.world_size)
    ... except gpucoll.PeerLostError:
    ...     comm = comm.shrink()
    ...     lost = state.resume(comm)  # {rank: w}
    >>> state.mean

    Every rank computes the weights of all ranks in every step, from what all push. So the survivors
    know the weight of a rank that is lost. They go back to the last step that all of them have
    made, as if what was under way had never been sent. Each keeps the arrays of two steps for that.

    Parameters
    ----------
    comm : Communicator
        Collective: all ranks make the object together.
    x, w
        See `push_sum`. x is copied.
    """

    def __init__(self, comm: Communicator, x: Any, w: float = 1.0) -> None:
        weights = _agreed(comm, x, w, (), None, None)
        self._comm = comm
        self._kept = [_State(0, copied(plain(x)), tuple(given for given, _ in weights))]
        self._ranks = tuple(range(comm.world_size))
        """Where the weight of each of the communicator's ranks lies in the states: elsewhere than
        at its own number only if a rank is lost while the survivors resume."""

    @property
    def x(self) -> Any:
        """This rank's part of the sum of all x."""
        return self._kept[-1].x

    @property
    def w(self) -> float:
        """This rank's weight."""
        return self._kept[-1].weights[self._ranks[self._comm.rank]]

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of all ranks."""
        return tuple(self._kept[-1].weights[place] for place in self._ranks)

    @property
    def mean(self) -> Any:
        """This rank's estimate of the weighted mean, x / w."""
        return self.x / self.w

    @property
    def steps(self) -> int:
        """The number of steps made."""
        return self._kept[-1].steps

    def push(self, to: int | Iterable[int], *, timeout_s: float | None = None) -> None:
        """Make a step: `push_sum` of this rank's x and w. After an error nothing has changed."""
        x, weights = _push(self._comm, self.x, self.w, to, None, timeout_s)
        self._kept = [self._kept[-1], _State(self.steps + 1, x, weights)]

    def resume(self, comm: Communicator) -> dict[int, float]:
        """Go on with the survivors, after a loss.

        Parameters
        ----------
        comm : Communicator
            What `shrink` returned. Collective: all of its ranks call `resume`.

        Returns
        -------
        dict of int to float
            The weight that went with each lost rank, by its number on the communicator before. What
            the survivors have left, in x as in w, is the sum of all minus the mass of these ranks.
        """
        if comm.former_ranks is None:
            raise ArgumentError("resume needs the communicator that shrink returned")
        if len(comm.former_ranks) > len(self._ranks):
            raise ArgumentError(
                f"resume: the communicator comes from one of more than {len(self._ranks)} ranks: "
                "resume after each shrink"
            )
        before = self._ranks
        self._ranks = tuple(before[former] for former in comm.former_ranks)
        self._comm = comm
        least = min(comm.all_gather_object(self.steps))
        (state,) = (kept for kept in self._kept if kept.steps == least)
        lost = {
            rank: state.weights[place]
            for rank, place in enumerate(before)
            if place not in self._ranks
        }
        weights = tuple(state.weights[place] for place in self._ranks)
        self._kept, self._ranks = [_State(least, state.x, weights)], tuple(range(comm.world_size))
        return lost


def _push(
    comm: Communicator, x: Any, w: float, to: int | Iterable[int], out: Any, timeout_s: float | None
) -> tuple[Any, tuple[float, ...]]:
    """Make a step; return this rank's x and the weights of all ranks."""
    targets = _targets(to)
    told = _agreed(comm, x, w, targets, out, timeout_s)
    sources = [rank for rank, (_, ranks) in enumerate(told) if comm.rank in ranks]
    x = plain(x)
    kept, part = _divided(x, len(told[comm.rank][1]))
    for array in exchange(comm, part, sources, told[comm.rank][1], ARRAYS, timeout_s):
        kept = kept + array
    return stored(kept, x, out), _new_weights(told)


def _new_weights(told: list[tuple[float, list[int]]]) -> tuple[float, ...]:
    """Return the weights of all ranks after a step, in the same bits on each of them."""
    divided = [_divided(w, len(to)) for w, to in told]
    weights = [kept for kept, _ in divided]
    for (_, part), (_, to) in zip(divided, told, strict=True):
        for rank in to:
            weights[rank] += part
    return tuple(weights)


def _divided(x: Any, count: int) -> tuple[Any, Any]:
    """Return what is left of x after giving each of `count` ranks a part, and that part."""
    if not count:
        return x, x
    is_whole = isinstance(x, int) or str(getattr(x, "dtype", "")).removeprefix("torch.") in INTEGERS
    part = x // (count + 1) if is_whole else x / (count + 1)
    if hasattr(x, "dtype"):
        part = stored(part, x, None)
    return x - part * count, part


def _targets(to: Any) -> Any:
    """Return the ranks to push to as a list, or what was given if it is none."""
    if isinstance(to, numbers.Integral):
        return [int(to)]
    return list(to) if isinstance(to, Iterable) else to


def _agreed(
    comm: Communicator, x: Any, w: float, to: Any, out: Any, timeout_s: float | None
) -> list[tuple[float, list[int]]]:
    """Exchange what each rank has and pushes; raise on every rank if one's is wrong."""
    problem = problem_of_number("w", w)
    if not isinstance(to, list | tuple):
        problem = problem or f"to must be a rank or several; got {to!r}"
    problem = problem or problem_of_ranks(comm, "to", to)
    mine = describe(CALL, x, (*FLOATS, *INTEGERS), out=out)
    w = w if problem or type(w) in (int, float) else float(w)
    return agreed(comm, mine, problem, (w, to), timeout_s)
