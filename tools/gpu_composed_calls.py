"""Checks of composed calls: reductions that NCCL lacks, compression with residuals, captures.

They are part of tools/gpu_collectives.py, which runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from tests.collective_cases import ROOTED, Case

from gpucoll.errors import ArgumentError

__all__ = ["composed_checks", "expect", "left_out"]

LACKING = (
    ("sum", "int16"), ("max", "uint16"), ("band", "int32"), ("bor", "uint8"), ("bxor", "int64"),
    ("land", "int32"), ("lxor", "bool"), ("prod", "complex64"), ("sum", "float8_e4m3fn"),
)  # fmt: skip
"""Reductions that NCCL lacks, at least in some versions."""
WHERE = ("all_reduce", "reduce", "reduce_scatter", "scan")
COUNT = 100_003
ROUNDING = 1e-3
"""The rounding of a few float32 additions of numbers up to a few dozen."""

Outcome = dict[str, Any] | None
Check = Callable[[Any, Any], Outcome]


def composed_checks() -> Iterator[tuple[str, Check]]:
    """Yield the checks by name, in the same order on every rank."""
    for name in WHERE:
        for op, dtype in LACKING:
            case = Case(dtype, 1000, op, 0 if name in ROOTED else -1, collective=name)
            yield f"{name} {op} {dtype}", partial(_one_case, case)
    for how in ("int8_block", "float8_block", "bfloat16"):
        yield f"compressed all_reduce, {how}", partial(compressed, how)
    yield "compressed all_reduce, int8_block, residual", with_residual
    yield "compressed list of 20, int8_block, residual", list_with_residuals
    for title, make in CAPTURED.items():
        yield f"captured and replayed: {title}", partial(captured, make)


def _one_case(case: Case, comm: Any, kit: Any) -> Outcome:
    found: Outcome = kit.run(comm, case)
    return found


def left_out(why: str) -> dict[str, Any]:
    """Return the result of a check that cannot be made here."""
    return {"status": "left out", "detail": why}


def expect(found: Any, wanted: Any, tolerance: float = 0.0) -> None:
    """Raise AssertionError unless the values are right."""
    worst = float(np.max(np.abs(np.asarray(found, np.float64) - wanted), initial=0.0))
    if not worst <= tolerance:  # written so that NaN is wrong, too
        raise AssertionError(f"off by {worst:g}, where {tolerance:g} is allowed")


# --- compression ----------------------------------------------------------------------------------


def _inputs(world_size: int, count: int = COUNT) -> list[Any]:
    """Return each rank's input, which every rank can compute."""
    return [
        np.random.default_rng(rank).uniform(-1, 1, count).astype(np.float32)
        for rank in range(world_size)
    ]


def compressed(how: str, comm: Any, kit: Any) -> Outcome:
    """Reduce with compression; the error is at most a step of each rank's blocks, and one more."""
    inputs = _inputs(comm.world_size)
    found = comm.all_reduce(kit.array(inputs[comm.rank]), compression=how)
    worst = float(np.max(np.abs(kit.read(found) - np.sum(inputs, axis=0, dtype=np.float64))))
    step = 1 / 127 if how == "int8_block" else 1 / 8
    if worst > (allowed := 2 * (comm.world_size + 1) * comm.world_size * step):
        raise AssertionError(f"off by {worst:g}, where {allowed:g} is allowed")
    return {"worst": worst}


def with_residual(comm: Any, kit: Any) -> Outcome:
    """Reduce three times with a residual; results and residuals add up to the inputs."""
    inputs = _inputs(comm.world_size)
    x, residual = kit.array(inputs[comm.rank]), kit.array(np.zeros(COUNT, np.float32))
    total = np.zeros(COUNT)
    for _ in range(3):
        total += kit.read(comm.all_reduce(x, compression="int8_block", residual=residual))
    left = kit.read(comm.all_reduce(residual))
    expect(total + left, 3 * np.sum(inputs, axis=0, dtype=np.float64), ROUNDING)
    return {"left": float(np.max(np.abs(left)))}


def list_with_residuals(comm: Any, kit: Any) -> None:
    """Reduce a list with residuals, which is packed."""
    counts = [500 + 7 * place for place in range(20)]
    inputs = [_inputs(comm.world_size, count) for count in counts]
    xs = [kit.array(each[comm.rank]) for each in inputs]
    residuals = [kit.array(np.zeros(count, np.float32)) for count in counts]
    results = comm.all_reduce(xs, compression="int8_block", residual=residuals)
    lost = comm.all_reduce(residuals)
    for each, result, left in zip(inputs, results, lost, strict=True):
        found = kit.read(result).astype(np.float64) + kit.read(left)
        expect(found, np.sum(each, axis=0, dtype=np.float64), ROUNDING)


# --- captures -------------------------------------------------------------------------------------


def _plain(comm: Any, x: Any, out: Any, spare: Any) -> None:
    comm.all_reduce(x, out=out)


def _planned(comm: Any, x: Any, out: Any, spare: Any) -> None:
    comm.plan_all_reduce(x, out=out)()


def _composed(comm: Any, x: Any, out: Any, spare: Any) -> None:
    comm.all_reduce(x, "bxor", out=spare)
    comm.all_reduce(x, "sum", out=out)


def _compressed(comm: Any, x: Any, out: Any, spare: Any) -> None:
    comm.all_reduce(x, out=out, compression="int8_block", residual=spare)


CAPTURED: dict[str, tuple[str, Callable[[Any, Any, Any, Any], None]]] = {
    "all_reduce float32": ("float32", _plain),
    "a plan": ("float32", _planned),
    "all_reduce int16, bxor and sum": ("int16", _composed),
    "all_reduce int8_block, residual": ("float32", _compressed),
}
"""Name -> dtype and the captured calls, on an input, an output and another array."""


def captured(made: tuple[str, Callable[..., None]], comm: Any, kit: Any) -> Outcome:
    """Capture a call in a graph and launch it twice; return "refused" if no graph can have it."""
    if not hasattr(kit.kit, "captured"):
        return left_out("there are no graphs of these arrays")
    dtype, call = made
    # Multiples of 127 that are equal throughout a block are exact in int8_block.
    x, out, spare = (kit.array(np.zeros(1024, dtype)) for _ in range(3))
    call(comm, x, out, spare)  # this connects, and loads what must not be loaded during a capture
    kit.wait()
    comm.check()
    stream = kit.kit.stream()
    try:
        with stream, kit.kit.captured(stream) as graph:
            call(comm, x, out, spare)
    except ArgumentError as error:  # the same on all ranks
        return {"status": "refused", "detail": str(error)}
    for value in (127, 254):
        kit.kit.write(x, np.full(1024, value, dtype))
        graph.launch(stream)
        stream.synchronize()
        expect(kit.read(out), value * comm.world_size, 1e-3 * value)
    graph.close()
    comm.check()
    return None
