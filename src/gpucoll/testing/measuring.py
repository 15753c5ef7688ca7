"""Coverage of the code that ranks run, if coverage of the driver is being measured."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

Settings: TypeAlias = dict[str, Any]
"""Arguments of `coverage.Coverage`."""
STARTED_BY_ENVIRONMENT = (
    "COVERAGE_PROCESS_START",
    "COVERAGE_PROCESS_CONFIG",
    "COV_CORE_SOURCE",
    "COV_CORE_CONFIG",
    "COV_CORE_DATAFILE",
)
"""Settings that would measure the fork server, and each of its forks a second time."""


def current() -> Settings | None:
    """Return the settings with which this process is measured; None if it is not."""
    module = sys.modules.get("coverage")
    measured = module and module.Coverage.current()
    if not measured:
        return None
    return {
        "data_file": os.path.abspath(measured.get_option("run:data_file")),
        "data_suffix": True,  # one file for each process; pytest-cov combines them at the end
        "config_file": measured.config.config_file or False,
        "branch": measured.get_option("run:branch"),
        "source": measured.get_option("run:source"),
    }


@contextmanager
def measured(settings: Settings | None) -> Iterator[None]:
    """Measure this process within the block."""
    if settings is None:
        yield
        return
    import coverage

    measuring = coverage.Coverage(**settings)
    measuring.start()
    try:
        yield
    finally:
        measuring.stop()
        measuring.save()
