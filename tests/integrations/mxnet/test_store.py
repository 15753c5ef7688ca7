"""KVStore "gpucoll" in an environment of its own: our checks, and MXNet's own tests of stores."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "calls.py"
TAG = "1.9.1"
BESIDE = """
def assertRaises(error, function, *arguments):
    try:
        function(*arguments)
    except error:
        return
    raise AssertionError(f"{function.__name__} did not raise {error.__name__}")

def with_seed(seed=None):
    return lambda test: test

def setup_module():
    pass

teardown = setup_module
"""
"""What MXNet's tests take from their module "common", which needs nose."""
BEGIN = """
import gpucoll.integrations.mxnet
import mxnet
comm = gpucoll.init()
mxnet.gpu = mxnet.cpu
"""


@pytest.fixture(scope="module")
def on_ranks(mxnet):
    """Return a function that runs a command of MXNet's Python on ranks."""

    def run(n_ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [mxnet.python, "-m", "gpucoll", "run", "--no-prefix", "-n", str(n_ranks)]
        variables = {**os.environ, **mxnet.variables, "GPUCOLL_TIMEOUT_S": "20"}
        return subprocess.run(
            [*command, *arguments],
            env=variables,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    return run


@pytest.fixture(scope="module")
def mxnet_source(tmp_path_factory) -> Path:
    """Return MXNet's repository, which ``GPUCOLL_TEST_MXNET`` names or which is cloned."""
    if named := os.environ.get("GPUCOLL_TEST_MXNET"):
        return Path(named)
    packages = importlib.import_module("tests.integrations.packages")
    address = "https://github.com/apache/mxnet"
    return packages.repository_of(address, TAG, tmp_path_factory.mktemp("repository"))


def test_calls_and_trainers(on_ranks):
    done = on_ranks(2, str(PROGRAM))

    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.findall(r"passed (\w+)", done.stdout)
    written = re.findall(r"^def ([a-z]+_\w+)\(\)", PROGRAM.read_text("utf-8"), re.MULTILINE)
    assert sorted(passed) == sorted(2 * written)
    assert "Warning" not in done.stderr, done.stderr


def test_mxnets_own_tests_of_stores(on_ranks, mxnet_source, tmp_path):
    """Their store for tests is replaced by ours, on one rank: they expect a single worker."""
    text = (mxnet_source / "tests/python/unittest/test_kvstore_custom.py").read_text("utf-8")
    assert text.count("'teststore'") >= 6
    file = tmp_path / "test_kvstore_custom.py"
    file.write_text(BEGIN + text.replace("'teststore'", "'dist_sync_gpucoll'"), "utf-8")
    (tmp_path / "common.py").write_text(BESIDE, "utf-8")

    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:gpucoll", str(file)]
    done = on_ranks(1, *command)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 passed" in done.stdout


def test_mxnets_own_program_for_several_workers(on_ranks, mxnet_source, tmp_path):
    """Its GPUs are CPUs here."""
    text = (mxnet_source / "tests/nightly/dist_device_sync_kvstore_custom.py").read_text("utf-8")
    file = tmp_path / "program.py"
    file.write_text(BEGIN + text, "utf-8")

    done = on_ranks(2, str(file), "--name", "dist_sync_gpucoll")

    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"worker {rank} is done" in done.stdout for rank in range(2))
