"""Each test belongs to one tier, a run takes the tiers it is asked for, and says what it left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests import tiers
from tests.tiers import PLACES, TIERS, covering

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

def test_plain(): pass

@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", [1, 2, 3])
def test_product(a, b): pass

@pytest.mark.soak
def test_long(): pass

@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("a", [1, 2, 3])
def test_long_in_part(a): pass
"""
QUICK = ["test_plain", "test_product[1-1]", "test_product[2-2]", "test_product[3-1]"]
QUICK += ["test_long_in_part[1]"]
SOAK = ["test_product[1-2]", "test_product[2-1]", "test_product[3-2]", "test_long"]
SOAK += ["test_long_in_part[2]", "test_long_in_part[3]"]


@pytest.fixture
def run(tmp_path):
    """Run pytest on `TESTS` with this folder's conftest; return which tests ran, and the output."""
    (tmp_path / "test_some.py").write_text(TESTS)

    def run_pytest(*arguments):
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:cov"]
        command += ["-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml")]
        command += ["--rootdir", str(tmp_path)]
        given = {**os.environ, "PYTEST_ADDOPTS": ""}
        given["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        given["PYTHONFAULTHANDLER"] = "1"
        process = subprocess.Popen(
            [*command, *(arguments or ["."])],
            env=given,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)  # pytest and its workers tell where they stand
            output, _ = process.communicate(timeout=10)
        assert process.returncode == 0, output
        ran = [line for line in output.splitlines() if "PASSED" in line]
        names = {word.partition("::")[2] for line in ran for word in line.split() if "::" in word}
        return names, output

    return run_pytest


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_the_quick_tier_unless_asked(run, workers):
    names, output = run(*workers, ".")
    assert names == {*QUICK}
    assert "Left to other tiers: 6 of soak (pytest --tier all; tests/README.md)" in output


def test_another_tier(run):
    names, output = run("--tier", "soak", ".")
    assert names == {*SOAK}
    assert "Left to other tiers: 5 of quick" in output


def test_the_mark_in_a_file_of_another_tier():
    marked, plain = (Mock(nodeid=f"tests/backends/mpi/test_mpi.py::test_it[{n}]") for n in range(2))
    plain.get_closest_marker.return_value = None
    assert [*tiers.tiers_of([marked, plain])] == ["soak", "mpi"]


def test_files_that_compile_for_long_are_in_one_share_each():
    items: list[Any] = [
        Mock(nodeid=f"{file}::test_it[{n}]") for file in tiers.IN_ONE_SHARE for n in range(9)
    ]
    assert {tiers.place_of(file) for file in tiers.IN_ONE_SHARE} == {"soak"}
    kept = []
    for part in range(5):
        others = tiers._other_shares(items, ["soak"] * len(items), part, 5)
        kept.append([item for item in items if item not in others])
    assert [len(share) for share in kept] == [9, 9, 9, 0, 0]


@pytest.mark.soak
def test_a_share_of_the_cases_in_soak(run):
    shares = [run("--tier", "soak", "--share", f"{part}/3", ".")[0] for part in (1, 2, 3)]
    assert sorted(name for share in shares for name in share) == sorted(SOAK)


def test_all_tiers(run):
    names, output = run("--tier", "all", ".")
    assert names == {*QUICK, *SOAK}
    assert "Left to" not in output


def test_one_that_is_named_runs(run):
    names, _ = run("test_some.py::test_long", "test_some.py::test_product[2-1]")
    assert names == {"test_long", "test_product[2-1]"}


def test_marks_choose_among_all(run):
    assert run("-m", "soak", ".")[0] == {
        "test_long",
        *(f"test_long_in_part[{n}]" for n in (1, 2, 3)),
    }


@pytest.mark.parametrize(
    ("cases", "chosen"),
    [
        ([{}], [0]),
        ([{"a": 0}, {"a": 1}], [0, 1]),
        ([{"a": 0, "b": 0}, {"a": 0, "b": 1}, {"a": 1, "b": 0}, {"a": 1, "b": 1}], [0, 3]),
    ],
)
def test_cases_that_have_each_value(cases, chosen):
    assert covering(cases) == chosen


def test_places_exist():
    assert [path for path in PLACES if not (ROOT / path).exists()] == []
    assert {*PLACES.values()} <= {*TIERS}
