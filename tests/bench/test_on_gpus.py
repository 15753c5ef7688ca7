"""The whole command on arrays of GPUs: real processes over doubles of NCCL and CUDA's driver."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from gpucoll import config
from gpucoll.bench import cli, gpus
from gpucoll.bench.rank.arrays import NoGpuError, own_gpu

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["-b", "4", "-e", "4K", "-f", "32", "-n", "3", "-w", "1", "--rounds", "3"]

LOOK_ALIKE = """
import sys
sys.path.insert(0, {root!r})
from tests.calls.gpu import cupy_double
sys.path.remove({root!r})
cupy_double.install("cuda")
"""


@pytest.fixture
def double(doubles, monkeypatch, tmp_path):
    """Let processes that are started from now on find the doubles, and a look-alike of CuPy."""
    made = doubles.double("nccl")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "cupy.py").write_text(LOOK_ALIKE.format(root=str(ROOT)))
    before = os.environ.get("PYTHONPATH")
    paths = [str(tmp_path / "path"), *filter(None, [before])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.syspath_prepend(tmp_path / "path")
    for name, value in {**made.variables, **made.search_path, config.GPU_KIND: "cuda"}.items():
        monkeypatch.setenv(name, value)
    yield made
    sys.modules.pop("cupy", None)


def results(text):
    return [line.split() for line in text.splitlines() if not line.startswith("#")]


def test_a_sweep(double, tmp_path, capfd):
    path = tmp_path / "result.json"
    more = ["--array", "cupy", "--symmetric", "--plan", "--json", str(path)]
    assert cli.main(["all_reduce,all_gather,scan", "--ranks", "2", *SHORT, *more]) == 0
    captured = capfd.readouterr()
    rows = results(captured.out)
    assert {row[0] for row in rows} == {"4", "128", "4096"} | {"8"}
    assert all(row[8] == row[12] == "0" for row in rows)
    assert "# gpucoll: gpucoll 0.1.0.dev0 over NCCL 2.29.7, cupy a look-alike, GPU Double of" in (
        captured.out
    )
    content = json.loads(path.read_text())
    assert content["environment"]["array"] == "cupy"
    assert content["environment"]["pinned_cpus"] is None
    assert (
        content["environment"]["timing"].count("It ends when the GPU has completed all of them.")
        == 1
    )
    placements = {(entry["library"], entry["placement"]) for entry in content["results"]}
    assert placements == {
        ("gpucoll", "private"), ("gpucoll", "symmetric"), ("gpucoll-plan", "private"),
    }  # fmt: skip


@pytest.mark.soak
def test_every_collective_with_a_rank_for_each_gpu(double, monkeypatch, capfd):
    found = [{"name": "Double"}] * 3
    answer = {"devices": found, "may_share": False, "kind": "cuda", "kind_reason": ""}
    monkeypatch.setattr(gpus, "ask", lambda questions: [(answer, None)])
    assert cli.main(["all", *SHORT, "--array", "cupy"]) == 0
    out = capfd.readouterr().out
    assert out.count("nRanks 3") == 14
    assert "# Out of bounds values : 0 OK" in out


@pytest.mark.soak
def test_a_copy_is_the_limit(double, tmp_path, capfd):
    path = tmp_path / "result.json"
    arguments = ["all_reduce,all_gather", "--ranks", "2", *SHORT, "--array", "cupy", "--limit"]
    assert cli.main([*arguments, "--plan", "--json", str(path)]) == 0
    out = capfd.readouterr().out
    assert out.count("# copy: a copy of the same size within the device of rank 0") == 2
    assert out.count(" gpucoll busbw / copy ") == out.count(" gpucoll-plan busbw / copy ") == 6
    content = json.loads(path.read_text())
    assert all(entry["library"] != "copy" for entry in content["results"])
    assert [entry["library"] for entry in content["limit"]] == ["copy"] * 6
    for entry in content["limit"]:
        side = entry["out_of_place"]
        assert side["alg_bw"] == pytest.approx(entry["size"] / side["time"] / 1e3)
        assert side["bus_bw"] == pytest.approx(2 * side["alg_bw"])
        first, second = side["samples_us"]
        assert min(first) > 0
        assert not any(second)  # rank 0 is alone on its GPU


def test_through_the_direct_backend(double, tmp_path, capfd):
    arguments = ["all_reduce", "--ranks", "2", *SHORT, "--array", "cupy", "--backend", "direct"]
    assert cli.main(arguments) == 0
    captured = capfd.readouterr()
    assert "# gpucoll: gpucoll 0.1.0.dev0 over backend direct, cupy a look-alike" in captured.out
    assert all(row[8] == row[12] == "0" for row in results(captured.out))


@pytest.mark.soak
def test_what_the_library_cannot_reduce_goes_by_kernels(double, capfd):
    arguments = ["--ranks", "2", "-b", "64", "-e", "64", "-n", "1", "-w", "0", "--rounds", "1"]
    assert cli.main([*arguments, "--array", "cupy", "-d", "int16,int32,bool", "-o", "all"]) == 0
    out = capfd.readouterr().out
    types = {row[2] for row in results(out)}
    assert types == {"int16", "int32", "bool"}


@pytest.mark.soak
def test_a_list_in_one_call(double, capfd):
    arguments = ["--ranks", "2", *SHORT, "--array", "cupy", "--list", "4"]
    assert cli.main(arguments) == 0
    assert "gpucoll-list" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("found", "problem", "more", "expected"),
    [
        (None, "no answer within 30 s; it was ended", [], "the search for GPUs failed: no answer"),
        ([], None, [], "needs a GPU, but none was found: there are no device files"),
        (
            [{}],
            None,
            ["--ranks", "2", "--backend", "nccl"],
            "with nccl each rank needs a GPU of its own, but this process sees 1; --backend direct",
        ),
    ],
)
def test_too_few_gpus(monkeypatch, capfd, found, problem, more, expected):
    answer = found is not None and {
        "devices": found,
        "may_share": False,
        "kind": "",
        "kind_reason": "there are no device files",
    }
    monkeypatch.setattr(gpus, "ask", lambda questions: [(answer or None, problem)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert cli.main(["--array", "cupy", *more]) == 2
    assert expected in capfd.readouterr().err


def test_intel_gpus_are_not_counted(monkeypatch):
    answer = {"devices": [], "may_share": False, "kind": "sycl", "kind_reason": "asked for"}
    monkeypatch.setattr(gpus, "ask", lambda questions: [(answer, None)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert gpus.ranks_on_gpus("torch", 3, "oneccl") == 3
    with pytest.raises(NoGpuError, match="give --ranks N, one for each Intel GPU"):
        gpus.ranks_on_gpus("torch", None)


def test_no_array_library(monkeypatch, capfd):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["--array", "cupy"]) == 2
    assert "--array cupy: not installed here: pip install 'gpucoll[cuda" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--array", "jax"], "invalid choice"),
        (["--backend", "direct"], "--backend direct moves arrays on GPUs: add --array"),
        (["barrier", "--array", "cupy", "--limit"], "barrier has no arrays, so there is no copy"),
        (["--array", "cupy", "--compare", "gloo"], "--compare gloo is for host arrays only"),
        (["--compare", "cupy-nccl"], "is for arrays on GPUs: add --array"),
    ],
)
def test_contradictions(arguments, expected, capfd):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert expected in capfd.readouterr().err


def test_a_library_that_sees_no_gpu():
    with pytest.raises(NoGpuError, match="PyTorch finds no GPU: is it a CPU build"):
        own_gpu(0, 0, "PyTorch")
    assert [own_gpu(rank, 4, "CuPy") for rank in (0, 3, 4)] == [0, 3, 0]
