"""What is refused before an engine is asked for anything; engines that are not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gpucoll
from gpucoll.integrations import dask, ray
from gpucoll.integrations.engine import arguments

ENGINES = {"ray": (ray, "pip install ray"), "distributed": (dask, "pip install distributed")}


@pytest.mark.parametrize("module", ENGINES)
def test_an_engine_that_is_not_installed(module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    integration, remedy = ENGINES[module]

    with pytest.raises(gpucoll.BackendUnavailableError, match=f"needs {module}.*{remedy}"):
        integration.run(print, world_size=2)


@pytest.mark.parametrize("name", ["ray", "dask"])
def test_an_import_loads_no_engine(name):
    program = f"""\
import sys, gpucoll.integrations.{name}
print([name for name in ("ray", "dask", "distributed", "numba", "numpy") if name in sys.modules])
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )

    assert ended.stdout == "[]\n"


@pytest.mark.parametrize(
    ("world_size", "kind"),
    [(0, ValueError), (-1, ValueError), (2.0, TypeError), ("2", TypeError), (True, TypeError)],
)
@pytest.mark.parametrize("integration", [ray, dask])
def test_a_wrong_world_size(integration, world_size, kind):
    with pytest.raises(kind, match="world_size must be") as caught:
        integration.Workers(world_size)
    assert isinstance(caught.value, gpucoll.UsageError)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ((5, (), None), "expected a function; got a int"),
        ((print, "ab", None), "args must be a tuple or list; got 'ab'"),
        ((print, (), [1]), r"kwargs must be a mapping; got \[1\]"),
    ],
)
def test_a_wrong_call(call, text):
    with pytest.raises(gpucoll.ArgumentTypeError, match=f"engine: {text}"):
        arguments.check_call("engine", *call)


@pytest.mark.parametrize(
    ("value", "kind"), [(-1, ValueError), (float("inf"), ValueError), ("1", TypeError)]
)
def test_a_wrong_time(value, kind):
    with pytest.raises(kind, match="engine: timeout_s must be a number of seconds"):
        arguments.check_seconds("engine", "timeout_s", value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([1], r"init must be a mapping of arguments; got \[1\]"),
        ({"rank": 1, "meet": "x"}, "init must not contain rank, meet: the run sets it"),
        ({"devise": 0}, "gpucoll.init has no argument devise"),
    ],
)
def test_wrong_options_of_init(options, text):
    with pytest.raises(gpucoll.UsageError, match=text):
        arguments.new_run("engine", 2, options)


def test_a_runs_name_and_secret_are_its_own():
    runs = [arguments.new_run("engine", 2, None) for _ in range(10)]

    assert len({run.name for run in runs}) == len({run.secret for run in runs}) == 10
    assert not any(run.secret in repr(run) for run in runs)
