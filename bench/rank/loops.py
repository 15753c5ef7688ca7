"""The loops that are timed: calls with nothing between them, whatever they take.

timeit's own loop is used: the call stands in it as a program would have it, with its arguments in
local variables. Unpacking a tuple would cost as much as a tenth of the quickest call.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

from gpucoll.bench.rank.library import Array, Loop

__all__ = ["WINDOW", "ping_pong", "repeated", "stream", "timed"]

Wait = Callable[[], None]

WINDOW = 8
"""Messages of a stream to each reply."""


def timed(statement: str, wait: Wait | None = None, **names: Any) -> Loop:
    """Return the loop around a statement in which `names` may be used.

    Where its calls only enqueue, `wait` waits for all of them, within the time that is taken.
    """
    setup = "\n".join(f"{name} = names[{name!r}]" for name in names) or "pass"
    loop = timeit.Timer(statement, setup, globals={"names": names}).timeit
    if wait is None:
        return loop

    def run(reps: int) -> float:
        begun_s = time.perf_counter()
        loop(reps)
        wait()
        return time.perf_counter() - begun_s

    return run


def repeated(*calls: partial[Any], wait: Wait | None = None) -> Loop:
    """Return the loop that makes a call, or several of one function one after another.

    A `partial` only describes a call here: the loop itself calls its function.
    """
    first = calls[0]
    names = [f"argument_{number}" for number in range(len(first.args))]
    positional = len(names)
    names += first.keywords
    passed = [*names[:positional], *(f"{name}={name}" for name in first.keywords)]
    statement = f"function({', '.join(passed)})"
    values = [(*call.args, *call.keywords.values()) for call in calls]
    if len(calls) == 1:
        arguments = dict(zip(names, values[0], strict=True))
        return timed(statement, wait, function=first.func, **arguments)
    each = f"for {', '.join(names)} in values:\n    {statement}"
    return timed(each, wait, function=first.func, values=values)


def ping_pong(
    rank: int,
    send: Any,
    receive: Any,
    source: Array,
    destination: Array,
    wait: Wait | None = None,
) -> Loop:
    """Return the loop of messages from rank 0 to rank 1 and back; a call is one of the two ways."""
    names = {"send": send, "receive": receive, "source": source, "destination": destination}
    if rank == 0:
        round_trip = timed("send(source, 1)\nreceive(destination, 1)", wait, **names)
    elif rank == 1:
        round_trip = timed("receive(destination, 0)\nsend(source, 0)", wait, **names)
    else:
        return idle
    return lambda reps: round_trip(reps) / 2


def stream(
    rank: int,
    send: Any,
    receive: Any,
    source: Array,
    destination: Array,
    reply: Array,
    wait: Wait | None = None,
) -> Loop:
    """Return the loop of messages from rank 0 to rank 1; a call is one of them.

    After each `WINDOW` of them comes a small `reply`: no sender is further ahead than that. The
    last window is finished, and counted in part.
    """
    names = {"send": send, "receive": receive, "reply": reply}
    if rank == 0:
        statements = ["send(source, 1)"] * WINDOW + ["receive(reply, 1)"]
        window = timed("\n".join(statements), wait, source=source, **names)
    elif rank == 1:
        statements = ["receive(destination, 0)"] * WINDOW + ["send(reply, 0)"]
        window = timed("\n".join(statements), wait, destination=destination, **names)
    else:
        return idle

    def run(reps: int) -> float:
        windows = -(-reps // WINDOW)
        return window(windows) * reps / (windows * WINDOW)

    return run


def idle(reps: int) -> float:
    """Take no part: the next barrier is where this rank waits."""
    return 0.0
