"""Predictions as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from gpucoll.bench.predict.fitting import Fit
from gpucoll.bench.predict.prediction import Known, Predicted
from gpucoll.bench.predict.validation import Validation

__all__ = ["lines"]

_NAMES: Final = {
    "message_s": "a small message",
    "overhead_s": "overhead at each end",
    "seconds_per_byte": "a byte",
    "large_s": "preparing a large call",
    "latency_s": "latency",
    "slot_s_per_byte": "a byte of small arrays",
    "stage_s_per_byte": "a byte of larger ones",
    "memory_s_per_byte": "a byte beyond the caches",
}
_GOAL: Final = {"sizes": 0.05, "ranks": 0.10}


def lines(known: Known, predictions: Sequence[Predicted]) -> Iterator[str]:
    """Yield the lines to print: what is known, how it was validated, the predictions."""
    yield "#"
    yield "# PREDICTED, not measured: a lower bound without contention and without noise"
    if known.memory is not None:
        yield from _parameters("shared memory", known.memory.fit)
    if known.network is not None:
        yield from _parameters("network", known.network.fit)
    elif any(one.case.hosts > 1 for one in predictions):
        network = known.machine.network
        yield (
            f"# network, {known.source}: {float(network.latency_s) * 1e6:g} us, "
            f"{8e-9 / float(network.seconds_per_byte):g} Gbit/s"
            + ("; name yours with --link LATENCY_US,GBIT" if known.source == "assumed" else "")
        )
        yield "# (nothing was measured there: intervals are those of the part in shared memory)"
    level = "network" if known.network is not None else "shared memory"
    yield from _validated(f"{level}, held-out sizes", known.sizes, _GOAL["sizes"])
    yield from _validated(f"{level}, held-out ranks", known.ranks, _GOAL["ranks"])
    yield "#"
    yield from _rows(known, predictions)


def _parameters(level: str, fit: Fit) -> Iterator[str]:
    """Yield a line for each fitted parameter of a level."""
    for name, is_known in zip(fit.names, fit.is_measured, strict=True):
        factor, unit = (1e9, "ns/B") if name.endswith("per_byte") else (1e6, "us")
        value, (low, high) = fit.value(name), fit.interval(name)
        found = f"{value * factor:.4g} {unit} [{low * factor:.4g}, {high * factor:.4g}]"
        if not is_known:
            found = f"{value * factor:.4g} {unit} (assumed: these measurements do not show it)"
        yield f"# {level}, fitted: {_NAMES[name]} {found}"


def _validated(title: str, found: Validation, goal: float) -> Iterator[str]:
    """Yield the line that says how held-out cases were predicted."""
    if not found.cases:
        yield f"# {title}: none were measured"
        return
    beats = found.error < found.scaled_error
    yield (
        f"# {title}: {len(found.cases)} cases, geometric mean error {found.error:.1%} "
        f"({'within' if found.error <= goal else 'above'} {goal:.0%}), "
        f"{found.coverage:.0%} in the 95 % interval; the last point scaled by bus bandwidth: "
        f"{found.scaled_error:.1%}"
        + ("" if beats else ", which is BETTER: do not trust this prediction more than that")
    )


def _rows(known: Known, predictions: Sequence[Predicted]) -> Iterator[str]:
    """Yield the table of the predictions."""
    yield (
        f"#{'ranks':>7} {'hosts':>7} {'size':>12} {'time':>11} {'95 % interval':>24}  "
        f"{'dominated by':<20} {'schedule':<20} {'extrapolated':>12}"
    )
    yield f"#{'':>7} {'':>7} {'(B)':>12} {'(us)':>11} {'(us)':>24}"
    for one in predictions:
        low, high = f"{one.low_s * 1e6:.2f}", f"{one.high_s * 1e6:.2f}"
        between = f"[{low}, {high}]" if low != high else "none: not measured"
        share = f"{one.dominated_by} {one.shares[one.dominated_by]:.0%}"
        yield (
            f" {one.case.ranks:>7} {one.case.hosts:>7} {one.case.size_bytes:>12} "
            f"{one.time_s * 1e6:>11.2f} {between:>24}  {share:<20} {one.way:<20} "
            f"{f'{one.case.ranks / known.most_ranks:g}x':>12}"
        )
