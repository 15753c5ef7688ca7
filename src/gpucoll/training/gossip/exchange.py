"""What all calls of gossip do with arrays: describe them, copy them, exchange them."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gpucoll import ArgumentError, ArgumentTypeError, Communicator, MismatchError, wait_all

__all__ = ["Description", "agreed", "compare", "copied", "describe", "exchange", "plain"]
__all__ += ["problem_of_number", "problem_of_ranks", "rank_of", "stored"]

FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
INTEGERS = ("int8", "int16", "int32", "int64")


class Description(NamedTuple):
    """What neighbours must have in common; `problem` is what is wrong with a rank's arguments."""

    call: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    detail: str = ""
    problem: str = ""

    def __str__(self) -> str:
        return self.problem or f"{self.dtype} of shape {self.shape}{self.detail}"

    def encoded(self) -> bytes:
        """Return it as bytes, for a message."""
        return json.dumps(self).encode()

    @staticmethod
    def decoded(message: bytes) -> Description:
        """Return what another rank has encoded."""
        call, dtype, shape, detail, problem = json.loads(message)
        return Description(call, dtype, tuple(shape), detail, problem)


def describe(
    call: str, x: Any, dtypes: Iterable[str], detail: str = "", out: Any = None
) -> Description:
    """Describe a rank's array, or what is wrong with it or with `out`."""
    kind, dtype = type(x), str(getattr(x, "dtype", "")).removeprefix("torch.")
    if not (hasattr(x, "shape") and hasattr(x, "__mul__")):
        problem = f"x must be an array that can be computed with; got {kind.__name__}"
        return Description(call, problem=problem)
    if dtype not in dtypes:
        problem = f"x has dtype {dtype or x.dtype}; {call} works on {', '.join(dtypes)}"
        return Description(call, problem=problem)
    if out is not None:
        is_alike = (getattr(out, "dtype", None), getattr(out, "shape", None)) == (x.dtype, x.shape)
        is_writable = getattr(getattr(out, "flags", None), "writeable", not hasattr(out, "at"))
        if not (is_alike and is_writable):  # `at` is how JAX, whose arrays never change, spells it
            problem = f"out must be a writable array of x's library, {dtype} of shape {x.shape}"
            return Description(call, problem=problem)
    return Description(call, dtype, tuple(map(int, x.shape)), detail)


def compare(comm: Communicator, mine: Description, others: dict[int, Description]) -> None:
    """Raise unless this rank and these others have the same, and nothing is wrong with it."""
    if mine.problem:
        raise ArgumentTypeError(f"{mine.call} on {rank_of(comm)}: {mine.problem}")
    for rank, other in others.items():
        if other != mine:
            raise MismatchError(
                f"{mine.call} on {rank_of(comm)}: this rank has {mine}; rank {rank} has "
                f"{other.call + ': ' if other.call != mine.call else ''}{other}. "
                "Nothing was moved: pass the same on all ranks"
            )


def agreed(
    comm: Communicator, mine: Description, problem: str, facts: Any, timeout_s: float | None = None
) -> list[Any]:
    """Exchange the facts of all ranks; raise on every rank if one's arguments are wrong."""
    told = comm.all_gather_object(
        (mine._replace(problem=problem or mine.problem), None if problem else facts),
        timeout_s=timeout_s,
    )
    if problem:
        raise ArgumentError(f"{mine.call} on {rank_of(comm)}: {problem}")
    compare(comm, mine, {rank: each for rank, (each, _) in enumerate(told)})
    return [each for _, each in told]


def problem_of_ranks(comm: Communicator, name: str, ranks: Sequence[Any]) -> str:
    """Return why these are not different other ranks, or an empty string."""
    for rank in ranks:
        if isinstance(rank, bool) or not isinstance(rank, numbers.Integral):
            return f"{name} must name ranks by ints; got {rank!r}"
        if int(rank) not in range(comm.world_size):
            return f"{name} names rank {rank}; there are ranks 0 to {comm.world_size - 1}"
        if rank == comm.rank:
            return f"{name} names rank {rank} itself"
        if ranks.count(rank) > 1:
            return f"{name} names rank {rank} twice"
    return ""


def problem_of_number(name: str, value: object) -> str:
    """Return why this is no finite number, or an empty string."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        return f"{name} must be a finite number; got {value!r}"
    return ""


def rank_of(comm: Communicator) -> str:
    """Return "rank 1 of 4"."""
    return f"rank {comm.rank} of {comm.world_size}"


def plain(x: Any) -> Any:
    """Return the same memory without a tensor's gradient."""
    return x.detach() if hasattr(x, "detach") else x


def copied(x: Any) -> Any:
    """Return a copy, of the same library."""
    return x.clone() if hasattr(x, "clone") else x.copy()


def stored(result: Any, x: Any, out: Any) -> Any:
    """Return a result in x's dtype, or write it into `out`."""
    if out is not None:
        if out is not result:
            plain(out)[...] = result
        return out
    return result if result.dtype == x.dtype else result.astype(x.dtype)


def exchange(
    comm: Communicator,
    x: Any,
    sources: Iterable[int],
    destinations: Iterable[int],
    tag: int,
    timeout_s: float | None,
) -> list[Any]:
    """Send x to the destinations; return what the sources sent, in their order."""
    with comm.group(async_op=True):
        received = [
            comm.recv(like=x, source=source, tag=tag, async_op=True, timeout_s=timeout_s)
            for source in sources
        ]
        sent = [
            comm.send(x, dest, tag, async_op=True, timeout_s=timeout_s) for dest in destinations
        ]
    arrays = wait_all(received)
    wait_all(sent)
    return arrays
