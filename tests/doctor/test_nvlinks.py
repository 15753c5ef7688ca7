"""NVLinks through a double of NVML, in processes of their own, to the word in the matrix."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.topology.machines import write_sysfs

from gpucoll.doctor.isolation import Question, ask
from gpucoll.doctor.network import topology
from gpucoll.topology.machine import SWITCH

SOURCE = Path(__file__).with_name("nvml_double.c")
NAME = "libnvidia-ml.so.1"
FIRST, SECOND = "0000:1b:00.0", "0000:1c:00.0"
TWO_GPUS = "node 0 0-7\n bridge 10\n  gpu 1b\n bridge 11\n  gpu 1c\n"


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Return a function that compiles the double and returns its folder."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler (cc) for the double of NVML")

    def compile_double(*defines):
        folder = tmp_path_factory.mktemp("nvml")
        options = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{NAME}"]
        command = [compiler, *options, *defines, "-o", str(folder / NAME), str(SOURCE)]
        made = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert made.returncode == 0, made.stderr
        return folder

    return compile_double


@pytest.fixture(scope="module")
def double(build):
    return build()


def probe(monkeypatch, folder, **settings):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    for name, value in settings.items():
        monkeypatch.setenv(f"NVML_DOUBLE_{name}", str(value))
    (answer,) = ask([Question("nvlinks", (), 60.0)])
    assert answer.problem is None
    return answer.found


def test_between_two_gpus(monkeypatch, double):
    found = probe(monkeypatch, double, LINKS=5)
    assert found == {FIRST: {SECOND: 4}, SECOND: {FIRST: 4}}


def test_to_switches(monkeypatch, double):
    found = probe(monkeypatch, double, LINKS=19, SWITCH=1)
    assert found == {FIRST: {SWITCH: 18}, SECOND: {SWITCH: 18}}


def test_none(monkeypatch, double):
    assert probe(monkeypatch, double, LINKS=0) == {FIRST: {}, SECOND: {}}


def test_nvml_does_not_start(monkeypatch, double):
    assert probe(monkeypatch, double, ERROR=9) is None


def test_nvml_is_too_old(monkeypatch, build):
    assert probe(monkeypatch, build("-DWITHOUT_REMOTE"), LINKS=5) is None


def test_nvml_is_not_there(monkeypatch, tmp_path):
    assert probe(monkeypatch, tmp_path) is None


@pytest.mark.parametrize(
    ("links", "word", "is_known"),
    [
        ({FIRST: {SWITCH: 18}, SECOND: {SWITCH: 18}}, "NV18", True),
        ({FIRST: {SECOND: 4}, SECOND: {FIRST: 4}}, "NV4", True),
        ({FIRST: {}, SECOND: {}}, "NODE", True),
        (None, "NODE", False),
    ],
)
def test_the_matrix_has_them(tmp_path, links, word, is_known):
    root = write_sysfs(tmp_path, TWO_GPUS)
    found = topology(json.dumps(links), root)
    assert found["gpu_to_gpu"] == [["SELF", word], [word, "SELF"]]
    assert found["knows_nvlinks"] is is_known
