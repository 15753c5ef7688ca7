"""The example that exports numbers by OpenTelemetry gives those of real ranks."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import numpy as np
import pytest

from gpucoll.observe.follow import Follower

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/opentelemetry_metrics.py"


def export(comm):
    """Return what rank 0 exports of calls that are made meanwhile, by metric; else None."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    follower = Follower(lambda: [os.getpid()] if comm.rank == 0 else [])
    follower.look()
    comm.barrier()
    for _ in range(3):
        comm.all_reduce(np.ones(4, np.float32))
    comm.barrier()
    comm.barrier()  # here all ranks have noted the calls before the last barrier
    follower.read()
    if comm.rank:
        follower.close()
        return None
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    runpy.run_path(str(EXAMPLE))["register"](provider.get_meter("gpucoll"), follower)
    data = reader.get_metrics_data()
    provider.shutdown()
    follower.close()
    return {
        metric.name: [(dict(point.attributes), point.value) for point in metric.data.data_points]
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_the_numbers_of_ranks_are_exported(ranks):
    pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk")
    found = ranks.call(2, export)[0]

    def total(name, **labels):
        return sum(value for has, value in found[name] if labels.items() <= has.items())

    assert total("gpucoll_calls_total", collective="all_reduce") == 6
    assert total("gpucoll_call_duration_seconds_count", collective="all_reduce") == 6
    assert total("gpucoll_call_duration_seconds_sum", collective="all_reduce") > 0
    assert total("gpucoll_ranks") == 2


def test_the_terminal_is_the_default(monkeypatch):
    pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk")
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    names = runpy.run_path(str(EXAMPLE))
    assert type(names["exporter"]()).__name__ == "ConsoleMetricExporter"
