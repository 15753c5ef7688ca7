"""Export the numbers of `gpucoll metrics` by OpenTelemetry, beside running jobs.

``python examples/opentelemetry_metrics.py`` prints them every ten seconds, until Ctrl-C. With
``pip install opentelemetry-exporter-otlp`` and OTEL_EXPORTER_OTLP_ENDPOINT it sends them there.
OpenTelemetry takes no histogram that somebody else has counted: of each histogram this exports the
number of calls and their seconds, as counters. Their quotient is the mean.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    ConsoleMetricExporter,
    MetricExporter,
    PeriodicExportingMetricReader,
)

from gpucoll.observe.counters import METRICS, Durations, Metric, Sample
from gpucoll.observe.follow import READ_S, Follower

EXPORT_S = 10.0
LOOK_EVERY = 5
"""After so many readings of calls, look for new jobs."""


def observations(follower: Follower, metric: Metric, part: str) -> Iterator[Observation]:
    """Yield the values of a metric, with their labels as attributes."""
    for sample in follower.samples:
        if sample.metric is metric:
            yield Observation(value_of(sample, part), attributes_of(sample))


def value_of(sample: Sample, part: str) -> float:
    """Return a value; of a histogram, the number of calls or their seconds."""
    if isinstance(sample.value, Durations):
        return float(sample.value.counts.sum()) if part == "count" else sample.value.seconds
    return sample.value


def attributes_of(sample: Sample) -> dict[str, str]:
    """Return the labels of a value."""
    return dict(zip(sample.label_names, sample.labels, strict=True))


def register(meter: Any, follower: Follower) -> None:
    """Make an instrument for each metric, which asks the follower when it is collected."""
    for name, metric in METRICS.items():
        for part in ("count", "sum") if metric.kind == "histogram" else ("",):

            def asked(
                _: CallbackOptions, metric: Metric = metric, part: str = part
            ) -> Iterable[Observation]:
                return observations(follower, metric, part)

            is_gauge = metric.kind == "gauge"
            make = meter.create_observable_gauge if is_gauge else meter.create_observable_counter
            make(f"{name}_{part}" if part else name, [asked], description=metric.text)


def exporter() -> MetricExporter:
    """Return an exporter to an OTLP endpoint if one is named, else to the terminal."""
    if "OTEL_EXPORTER_OTLP_ENDPOINT" in os.environ:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        return OTLPMetricExporter()
    return ConsoleMetricExporter(out=sys.stdout)


def main() -> None:
    """Follow all jobs of this host, and export their numbers until Ctrl-C."""
    follower = Follower()
    reader = PeriodicExportingMetricReader(exporter(), export_interval_millis=1000 * EXPORT_S)
    provider = MeterProvider([reader])
    register(provider.get_meter("gpucoll"), follower)
    try:
        while True:
            follower.look()
            for _ in range(LOOK_EVERY):
                time.sleep(READ_S)
                follower.read()
    except KeyboardInterrupt:
        pass
    finally:
        provider.shutdown()
        follower.close()


if __name__ == "__main__":
    main()
