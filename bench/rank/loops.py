"""The timed loops: calls with nothing between them.

They use timeit's own loop. The call is written as in a program, with its arguments in local
variables, since unpacking a tuple would cost up to a tenth of the fastest call.
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
"""Messages in a stream before each reply."""


def timed(statement: str, wait: Wait | None = None, **names: Any) -> Loop:
    """Return the loop around a statement that may use `names`.

    If its calls only enqueue, `wait` waits for all of them, within the measured time.
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
    """Return the loop that makes a call, or several calls of one function after another.

    A `partial` only describes a call: the loop itself calls the function. `then` is code that is
    applied to each result, such as ``.wait()``.
    """
    statement, arguments = described(calls[0])
    names = [name for name in arguments if name != "function"]
    if len(calls) == 1:
        return timed(statement + then, wait, **arguments)
    values = [(*call.args, *call.keywords.values()) for call in calls]
    each = f"for {', '.join(names)} in values:\n    {statement}{then}"
    return timed(each, wait, function=calls[0].func, values=values)


def described(call: partial[Any]) -> tuple[str, dict[str, Any]]:
    """Return a call as a statement, and the names in it: ``function`` and the arguments."""
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
    """Return the loop of messages from rank 0 to rank 1 and back; each direction is a call.

    `receiving` is the code that receives a message, and `names` are further names in it.
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
    """Return the loop of messages from rank 0 to rank 1; each message is a call.

    A small `reply` follows each `WINDOW` messages, so that a sender is never further ahead. The
    last window is completed, but only part of it is counted.
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
    """Return a loop after which `use` gets, untimed, what its last call left in `kept`."""

    def run(reps: int) -> float:
        kept[0] = None
        seconds = loop(reps)
        if kept[0] is not None:
            use(kept[0])
        return seconds

    return run


def idle(reps: int) -> float:
    """Do nothing: this rank waits in the next barrier."""
    return 0.0
