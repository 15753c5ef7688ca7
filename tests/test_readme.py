"""What the README shows runs as it stands there: alone, on ranks, and under pytest."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gpucoll.backends.precompile import ensure_compiled

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
LONGEST_LINES = 95  # about two screens
PROGRAM_S = 120


def block(language: str, containing: str) -> str:
    """Return the README's only block in a language that contains a text."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.M | re.S)
    (found,) = [each for each in blocks if containing in each]
    return found


def inline(containing: str) -> str:
    """Return the README's only code inside a paragraph that contains a text."""
    (found,) = [each for each in re.findall(r"`([^`\n]+)`", TEXT) if containing in each]
    return found


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Compiled before programs are started, which on a busy machine takes minutes."""
    ensure_compiled()


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=PROGRAM_S, cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_short():
    assert len(TEXT.splitlines()) <= LONGEST_LINES


def test_the_program(tmp_path):
    (tmp_path / "train.py").write_text(block("python", "gpucoll.init()"))
    command, *says = block("console", "train.py").splitlines()
    assert run(tmp_path, "train.py") == "0 [1. 1. 1.] [1. 1. 1.] [1. 1. 1.]\n"
    launcher, *arguments = shlex.split(command.removeprefix("$ "))
    assert launcher == "gpucoll-run"
    said = run(tmp_path, "-m", "gpucoll", "run", *arguments)
    assert sorted(said.splitlines()) == says


@pytest.mark.ranks(2)
def test_the_error(comm):
    import numpy as np

    import gpucoll

    with pytest.raises(gpucoll.MismatchError) as raised:
        comm.all_reduce(np.ones(3 + comm.rank))
    text = re.sub(r"\(#\d+\)", "(#1)", str(raised.value))
    assert f"`MismatchError: {text.split('. This')[0]}`" in " ".join(TEXT.split())


def test_torch_distributed(monkeypatch):
    dist = pytest.importorskip("torch.distributed")
    importlib.import_module("gpucoll.integrations.torch")  # if no entry point has registered it
    where = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    call = inline("torch.distributed")
    exec(f"import torch.distributed\n{call}", {})  # noqa: S102  (our own document)
    try:
        assert dist.get_backend() == "gpucoll"
    finally:
        dist.destroy_process_group()


def test_a_program_of_mpi4py(tmp_path):
    (tmp_path / "script.py").write_text(
        "from mpi4py import MPI\nprint(MPI.COMM_WORLD.allreduce(1))\n"
    )
    launcher, *arguments = shlex.split(inline("script.py"))
    assert launcher == "gpucoll-run"
    said = run(tmp_path, "-m", "gpucoll", "run", *arguments)
    assert sorted(said.splitlines()) == [f"[{rank}] 4" for rank in range(4)]


@pytest.mark.soak
def test_tests(tmp_path):
    (tmp_path / "test_largest.py").write_text(f"import pytest\n\n\n{block('python', 'def test_')}")
    said = run(tmp_path, "-m", "pytest", "-q", "-p", "gpucoll.testing.plugin", "test_largest.py")
    assert "2 passed" in said


def test_the_caption_tells_of_the_newest_result():
    newest = max((ROOT / "bench/results").glob("*-all_reduce-2-ranks.json"))
    content = json.loads(newest.read_text(encoding="utf-8"))
    times: dict[int, dict[str, float]] = {}
    for entry in content["results"]:
        if entry["in_place"] and entry["placement"] == "private":
            times.setdefault(entry["size"], {})[entry["library"]] = entry["in_place"]["time"]
    peers = ("mpich", "openmpi", "impi", "gloo")
    ratios = [each["gpucoll"] / min(each[peer] for peer in peers) for each in times.values()]
    command = re.sub(r"(\w+)=[^\s,]+", r"\1=PYTHON", content["environment"]["command"])
    (caption,) = re.findall(r"<sub>(.*)</sub>", TEXT, re.S)
    assert ("at every size" in TEXT) == (max(ratios) < 1)
    assert f"{min(ratios):.2f} to {max(ratios):.2f} of the time" in caption
    assert command.partition(" --json")[0] in " ".join(caption.split())
