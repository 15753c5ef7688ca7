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

__all__ = [
    "WINDOW",
    "Wait",
    "described",
    "idle",
    "keeping",
    "ping_pong",
    "repeated",
    "stream",
    "timed",
]

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


def repeated(*calls: partial[Any], wait: Wait | None = None, then: str = "") -> Loop:
    """Return the loop that makes a call, or several of one function one after another.

    A `partial` only describes a call here: the loop itself calls its function. `then` is what is
    done with each result, as ``.wait()``.
    """
    statement, arguments = described(calls[0])
    names = [name for name in arguments if name != "function"]
    if len(calls) == 1:
        return timed(statement + then, wait, **arguments)
    values = [(*call.args, *call.keywords.values()) for call in calls]
    each = f"for {', '.join(names)} in values:\n    {statement}{then}"
    return timed(each, wait, function=calls[0].func, values=values)


def described(call: partial[Any]) -> tuple[str, dict[str, Any]]:
    """Return a call as a statement, and the names in it: ``function``, then the arguments'."""
    positional = {f"argument_{number}": value for number, value in enumerate(call.args)}
    passed = [*positional, *(f"{name}={name}" for name in call.keywords)]
    names = {"function": call.func, **positional, **call.keywords}
    return f"function({', '.join(passed)})", names


def ping_pong(
    rank: int,
    send: Any,
    receive: Any,
    source: Array,
    destination: Array,
    wait: Wait | None = None,
    receiving: str = "receive(destination, other)",
    **names: Any,
) -> Loop:
    """Return the loop of messages from rank 0 to rank 1 and back; a call is one of the two ways.

    `receiving` is how one is received, and `names` what is named in it besides.
    """
    names |= {"send": send, "receive": receive, "source": source, "destination": destination}
    steps = ["send(source, other)", receiving]
    if rank > 1:
        return idle
    if rank == 1:
        steps.reverse()
    round_trip = timed("\n".join(steps), wait, other=1 - rank, **names)
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


def keeping(loop: Loop, kept: list[Any], use: Callable[[Any], object]) -> Loop:
    """Return a loop after which `use` gets what its last call has left in `kept`, untimed."""

    def run(reps: int) -> float:
        kept[0] = None
        seconds = loop(reps)
        if kept[0] is not None:
            use(kept[0])
        return seconds

    return run


def idle(reps: int) -> float:
    """Take no part: the next barrier is where this rank waits."""
    return 0.0
