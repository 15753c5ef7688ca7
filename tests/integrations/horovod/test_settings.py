"""Horovod's environment variables: what they set, what is refused, and what is said once."""

from __future__ import annotations

import re
import warnings

import pytest

from gpucoll import ArgumentError, config
from gpucoll.integrations.horovod import settings
from gpucoll.integrations.horovod.settings import Place, Settings, settings_of, warn_of_ignored


def test_defaults():
    assert settings_of({"HOROVOD_TIMELINE": " "}) == Settings()


def test_what_each_variable_sets():
    given = {
        "CYCLE_TIME": "2.5",
        "FUSION_THRESHOLD": "1024",
        "TIMELINE": "/tmp/timeline.json",
        "TIMELINE_MARK_CYCLES": "1",
        "STALL_CHECK_DISABLE": "1",
        "STALL_CHECK_TIME_SECONDS": "5",
        "STALL_SHUTDOWN_TIME_SECONDS": "10",
        "DYNAMIC_PROCESS_SETS": "1",
        "ELASTIC": "1",
        "ELASTIC_TIMEOUT": "7",
        "START_TIMEOUT": "8",
        "LOG_LEVEL": "debug",
    }
    found = settings_of({f"HOROVOD_{name}": text for name, text in given.items()})
    assert found == Settings(
        cycle_time_s=0.0025,
        fusion_threshold_bytes=1024,
        timeline="/tmp/timeline.json",
        timeline_mark_cycles=True,
        stall_check=False,
        stall_check_s=5.0,
        stall_shutdown_s=10.0,
        dynamic_process_sets=True,
        elastic=True,
        elastic_timeout_s=7.0,
        start_timeout_s=8.0,
        log_level="DEBUG",
    )


@pytest.mark.parametrize(
    ("name", "text", "form"),
    [
        ("CYCLE_TIME", "fast", "a number of milliseconds"),
        ("CYCLE_TIME", "nan", "a number of milliseconds"),
        ("CYCLE_TIME", "-1", "a number of milliseconds"),
        ("FUSION_THRESHOLD", "1e6", "a whole number of bytes"),
        ("STALL_CHECK_TIME_SECONDS", "inf", "a number of seconds"),
        ("ELASTIC", "yes", "0 or 1"),
        ("LOG_LEVEL", "loud", "one of TRACE, DEBUG"),
    ],
)
def test_wrong_values(name, text, form):
    said = f"HOROVOD_{name} must be {form}"
    with pytest.raises(ArgumentError, match=f"{re.escape(said)}.*got '{text}'"):
        settings_of({f"HOROVOD_{name}": text})


def test_what_does_nothing_is_said_once_on_rank_0(monkeypatch):
    monkeypatch.setattr(settings, "_has_warned", False)
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "1")
    monkeypatch.setenv("HOROVOD_HIERARCHICAL_ALLREDUCE", "0")
    monkeypatch.setenv("HOROVOD_CONTROLLER", "gloo")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_ignored(1)
    with pytest.warns(RuntimeWarning, match=r"HOROVOD_AUTOTUNE \(there is nothing"):
        warn_of_ignored(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_ignored(0)


def test_the_place_of_a_launcher(monkeypatch):
    monkeypatch.delenv(config.RANK, raising=False)
    assert Place.from_launcher() is None
    for name, text in (
        (config.RANK, "5"),
        (config.WORLD_SIZE, "8"),
        (config.LOCAL_RANK, "1"),
        (config.LOCAL_WORLD_SIZE, "4"),
    ):
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("HOROVOD_HOSTNAME", "node1")
    assert Place.from_launcher() == Place(5, 8, 1, 4, 1, 2, "node1")
    variables = Place(5, 8, 1, 4, 1, 2, "node1").variables()
    assert variables["HOROVOD_LOCAL_SIZE"] == "4"
    assert variables["HOROVOD_CROSS_RANK"] == "1"
    assert len(variables) == 7
