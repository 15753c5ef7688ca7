"""From calls to numbers: how often, how long, who waited for whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpucoll.collectives import Collective
from gpucoll.observe.rates import MOST_CALLS, Pending, Rates, mean_of, times_by_call
from gpucoll.observe.watch import CALL, Calls
from gpucoll.transport.shared.spans import SpanKind

S = 1_000_000_000
NOWHERE: Any = None


def calls_of(*rows):
    """Return calls of {rank, number, begun, ended}, in seconds after the first look, at 10 s."""
    calls = np.zeros(len(rows), CALL)
    for place, (rank, sequence, begun_s, ended_s) in enumerate(rows):
        calls[place]["rank"], calls[place]["sequence"] = rank, sequence
        calls[place]["begun_ns"] = (10 + begun_s) * S
        calls[place]["ended_ns"] = (10 + ended_s) * S
    calls["kind"], calls["collective"] = SpanKind.COLLECTIVE, Collective.ALL_REDUCE
    calls["size_bytes"] = 1000
    return calls


def pending_of(n_ranks, **since_s):
    """Return what is pending, from seconds after the first look."""
    found = {name: np.zeros(n_ranks, np.int64) for name in ("in_call", "waiting", "awaited")}
    for name, by_rank in since_s.items():
        for rank, each in by_rank.items():
            found[name][rank] = (10 + each) * S
    return Pending(**found)


def sample_of(calls, n_ranks=2, missed=None, **since_s):
    """Return the sample of a second look, one second after the first one."""
    rates = Rates(n_ranks, 10 * S)
    missed = np.zeros(n_ranks, np.int64) if missed is None else np.array(missed)
    return rates.add(Calls(NOWHERE, calls, missed), pending_of(n_ranks, **since_s), 11 * S)


def test_who_waited_for_whom():
    found = sample_of(calls_of((0, 1, 0.0, 0.5), (1, 1, 0.4, 0.5)))
    assert found.calls.tolist() == [1, 1]
    assert found.size_bytes.tolist() == [1000, 1000]
    assert found.in_calls.tolist() == pytest.approx([0.5, 0.1])
    assert found.waiting.tolist() == pytest.approx([0.4, 0.0])
    assert found.held_up.tolist() == pytest.approx([0.0, 0.4])
    assert not found.is_sampled


def test_a_call_that_is_not_over_counts_up_to_now():
    found = sample_of(calls_of(), in_call={0: -5}, waiting={0: -5}, awaited={1: -5})
    assert found.calls.tolist() == [0, 0]
    assert found.in_calls.tolist() == [1, 0]
    assert found.waiting.tolist() == [1, 0]
    assert found.held_up.tolist() == [0, 1]


def test_a_long_call_counts_once_over_two_looks():
    rates, missed = Rates(2, 10 * S), np.zeros(2, np.int64)
    blocked = pending_of(2, in_call={0: 0.25}, waiting={0: 0.25}, awaited={1: 0.25})
    rates.add(Calls(NOWHERE, calls_of(), missed), blocked, 11 * S)
    ended = calls_of((0, 1, 0.25, 1.5), (1, 1, 1.5, 1.5))
    rates.add(Calls(NOWHERE, ended, missed), pending_of(2), 12 * S)
    mean = mean_of(rates.samples, 2)
    assert mean.seconds == 2
    assert mean.in_calls.tolist() == pytest.approx([1.25 / 2, 0])
    assert mean.waiting.tolist() == pytest.approx([1.25 / 2, 0])
    assert mean.held_up.tolist() == pytest.approx([0, 1.25 / 2])


def test_calls_that_overlap_count_once():
    started = [(0, k, 0.1, 0.5) for k in range(3)]
    found = sample_of(calls_of(*started, (0, 3, 0.2, 0.6)))
    assert found.in_calls.tolist() == pytest.approx([0.5, 0])


def test_calls_that_were_missed_are_counted():
    calls = calls_of(
        *((rank, k, 0.8 + 0.02 * k, 0.81 + 0.02 * k) for rank in (0, 1) for k in range(10))
    )
    found = sample_of(calls, missed=[90, 40])
    assert found.is_sampled
    assert found.calls.tolist() == [100, 50]
    assert found.size_bytes.tolist() == [100_000, 50_000]
    assert found.in_calls.tolist() == pytest.approx([0.5, 0.5], abs=0.05)  # of what is known
    blocked = sample_of(calls, missed=[90, 40], in_call={0: 0.99})
    assert blocked.in_calls.tolist() == pytest.approx([0.51, 0.5], abs=0.05)


def test_a_rank_that_stopped_to_make_calls():
    messages = [(0, 0, 0.8 + 0.02 * k, 0.81 + 0.02 * k) for k in range(10)]
    found = sample_of(calls_of(*messages, (1, 1, 0.0, 0.1)), missed=[90, 0])
    assert found.in_calls.tolist() == pytest.approx([0.5, 0.0], abs=0.05)


def test_parts_of_calls_are_neither_counted_nor_timed():
    calls = calls_of((0, 1, 0.0, 0.2), (1, 1, 0.1, 0.2), (0, 7, 0.0, 0.5), (1, 7, 0.0, 0.5))
    calls["kind"][:2], calls["kind"][2:] = SpanKind.PART, SpanKind.SEVERAL_HOSTS
    found = sample_of(calls, missed=[2, 0])
    assert found.calls.tolist() == [2, 1]
    assert found.held_up[1] > 0
    assert sample_of(calls).in_calls.tolist() == pytest.approx([0.5, 0.5])


def test_calls_on_gpus_block_nobody():
    calls = calls_of((0, 1, 0.0, 0.9), (1, 1, 0.0, 0.9))
    calls["kind"] = SpanKind.GPU
    found = sample_of(calls)
    assert found.calls.tolist() == [1, 1]
    assert found.in_calls.tolist() == found.waiting.tolist() == [0, 0]


def test_messages_are_calls_whose_bytes_count_once():
    calls = calls_of((0, 0, 0.0, 0.2), (1, 0, 0.0, 0.2))
    calls["kind"], calls["collective"] = (SpanKind.SEND, SpanKind.RECV), 0
    found = sample_of(calls)
    assert found.calls.tolist() == [1, 1]
    assert found.size_bytes.tolist() == [1000, 0]
    assert [each.name for each in times_by_call(calls)] == ["send", "recv"]


def test_more_calls_than_are_put_together():
    n = MOST_CALLS
    step_s = 1 / n
    calls = calls_of(
        *((rank, k, k * step_s, (k + 0.5) * step_s) for rank in (0, 1) for k in range(n))
    )
    found = sample_of(calls)
    assert found.is_sampled
    assert found.calls.tolist() == [n, n]
    assert found.in_calls.tolist() == pytest.approx([0.5, 0.5], abs=0.01)


def test_nothing_is_kept_for_longer():
    rates, missed = Rates(1, 0), np.zeros(1, np.int64)
    for second in range(1, 30):
        rates.add(Calls(NOWHERE, calls_of((0, second, 0, 1)), missed), pending_of(1), second * S)
    assert len(rates.samples) == 10
    assert mean_of(rates.samples, 1, since_ns=27 * S).seconds == 2
    assert mean_of([], 3).calls.tolist() == [0, 0, 0]


def test_times_by_call():
    calls = calls_of(*((0, k, k, k + 0.001 * (1 + k)) for k in range(100)), (0, 100, 100, 109))
    calls["collective"][-1] = Collective.BARRIER
    barrier, reduction = times_by_call(calls)
    assert (barrier.name, barrier.count, barrier.p50_s) == ("barrier", 1, 9.0)
    assert (reduction.name, reduction.count, reduction.size_bytes) == ("all_reduce", 100, 1000)
    assert reduction.p50_s == pytest.approx(0.0505)
    assert reduction.p99_s == pytest.approx(0.09901)
    assert times_by_call(calls[:0]) == []
