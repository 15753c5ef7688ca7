"""Measure the CPU time of `gpucoll metrics`, with made-up calls.

::

    python tools/measure_metrics.py              # 64 ranks, 5 collectives
    python tools/measure_metrics.py --ranks 16

Each rank has made as many calls as it has room for, 2,048, since the last reading, which is the
most that one reading can find. The exporter reads once a second.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from prometheus_client import generate_latest

from gpucoll.collectives import Collective
from gpucoll.observe.counters import Numbers
from gpucoll.observe.follow import Follower
from gpucoll.observe.meetings import Register
from gpucoll.observe.metrics import registry_of
from gpucoll.observe.watch import CALL, Calls
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.spans import SpanKind

COLLECTIVES = (
    *(Collective.ALL_REDUCE, Collective.BROADCAST, Collective.REDUCE),
    *(Collective.ALL_GATHER, Collective.GATHER),
)
TURNS = 7


def made_up(ranks: int) -> Any:
    """Return calls of 4 bytes to 2 KiB, in which all ranks have been."""
    drawn, count = np.random.default_rng(0), layout.SPANS
    calls = np.zeros(ranks * count, CALL)
    calls["rank"] = np.repeat(np.arange(ranks), count)
    calls["sequence"] = np.tile(np.arange(count), ranks)
    calls["kind"] = SpanKind.COLLECTIVE
    calls["collective"] = np.tile(drawn.choice(COLLECTIVES, count), ranks)
    calls["size_bytes"] = np.tile(1 << drawn.integers(2, 12, count), ranks)
    calls["begun_ns"] = calls["sequence"] * 1000 + drawn.integers(0, 500, ranks * count)
    calls["ended_ns"] = calls["begun_ns"] + drawn.integers(100, 100_000, ranks * count)
    return calls


def main() -> None:
    """Print the CPU time of one reading, and of one answer to Prometheus."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    ranks = parser.parse_args().ranks
    nowhere: Any = None
    calls, names = made_up(ranks), [str(rank) for rank in range(ranks)]
    numbers, register = Numbers("1"), Register(ranks)
    follower = Follower(list)
    readings, answers = [], []
    for _ in range(TURNS):
        begun_s = time.process_time()
        found = Calls(nowhere, calls, np.zeros(ranks, np.int64))
        numbers.add_calls("0", names, found)
        numbers.add_meetings("0", names, register.add(found))
        follower.samples = tuple(numbers.samples())
        read_s = time.process_time()
        text = generate_latest(registry_of(follower))
        readings.append(read_s - begun_s)
        answers.append(time.process_time() - read_s)
        calls["sequence"] += layout.SPANS
    reading_ms, answer_ms = (1000 * statistics.median(each) for each in (readings, answers))
    print(
        f"{ranks} ranks, {len(calls)} calls: a reading {reading_ms:.0f} ms, an answer of "
        f"{len(text) >> 10} KiB {answer_ms:.0f} ms of CPU time"
    )


if __name__ == "__main__":
    main()
