"""Which backend moves which arrays: the pure functions behind it."""

from __future__ import annotations

import pytest

from gpucoll import config
from gpucoll.backends.choice import Found, Seen, choose, obstacle
from gpucoll.backends.discovery import look_for_gpus
from gpucoll.errors import ArgumentError

CUDA, ROCM = Seen("cuda", "there is /dev/nvidiactl"), Seen("rocm", "there is /dev/kfd")
NONE = Seen("", "nothing is there")


@pytest.mark.parametrize(
    ("wish", "seen", "host", "gpu", "reason"),
    [
        ("auto", [NONE, NONE], "cpu", "", "no GPU: nothing is there"),
        ("auto", [CUDA, CUDA], "cpu", "nccl", "chosen by auto: there is /dev/nvidiactl"),
        ("auto", [ROCM], "cpu", "rccl", "chosen by auto: there is /dev/kfd"),
        (
            "auto",
            [CUDA, NONE, CUDA, NONE],
            "cpu",
            "",
            "no GPU on ranks 1, 3: nothing is there; start",
        ),
        ("auto", [CUDA, ROCM], "cpu", "", "different vendors (cuda on rank 0, rocm on rank 1)"),
        ("cpu", [CUDA, CUDA], "cpu", "", "backend='cpu' was asked for"),
        ("nccl", [NONE, NONE], "", "nccl", "asked for"),
        ("rccl", [CUDA, ROCM], "", "rccl", "asked for"),
    ],
)
def test_choose(wish, seen, host, gpu, reason):
    choice = choose(wish, seen)

    assert (choice.host.backend, choice.gpu.backend) == (host, gpu)
    assert reason in choice.gpu.reason
    assert choice.host.reason


def found(uuid, version=(2, 27, 3), problem="", may_share=False, host=0):
    return Found(problem, "cuda:0", f"GPU-{uuid}", "H200", version, may_share, host)


@pytest.mark.parametrize(
    ("backend", "ranks", "said"),
    [
        ("nccl", [found(1)], ""),
        ("nccl", [found(1), found(2)], ""),
        ("nccl", [found(1, problem="no driver"), found(1)], "rank 0: no driver"),
        (
            "nccl",
            [found(1, problem="no driver"), found(2, problem="no driver")],
            "ranks 0, 1: no driver",
        ),
        (
            "nccl",
            [found(1), found(2, (2, 28, 9))],
            "different versions of NCCL (2.27.3 on rank 0, 2.28.9 on rank 1)",
        ),
        ("nccl", [found(1), found(2), found(1)], "ranks 0, 2 share one GPU (H200, GPU-1), which"),
        ("rccl", [found(1), found(2), found(1, host=1), found(2, host=1)], ""),
        ("rccl", [found(1), found(1, host=1), found(1, host=1)], "ranks 1, 2 share one GPU"),
        ("nccl", [found(1), found(1)], "NCCL 2.30.0 and later have an experimental way"),
        ("nccl", [found(1, (2, 30, 4))] * 2, "or try NCCL_MULTI_RANK_GPU_ENABLE=1"),
        ("nccl", [found(1, (2, 30, 4), may_share=True)] * 2, ""),
        ("rccl", [found(1)] * 2, "which RCCL 2.27.3 refuses: start one rank per GPU"),
    ],
)
def test_obstacle(backend, ranks, said):
    text = obstacle(backend, ranks)

    assert said in text
    assert bool(text) == bool(said)


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("dev/nvidiactl", "cuda"),
        ("dev/dxg", "cuda"),
        ("dev/nvhost-ctrl-gpu", "cuda"),
        ("dev/kfd", "rocm"),
        ("dev/null", ""),
    ],
)
def test_discovery_by_device_files(monkeypatch, tmp_path, file, kind):
    monkeypatch.delenv(config.CPU_ONLY, raising=False)
    path = tmp_path / file
    path.parent.mkdir()
    path.touch()

    seen = look_for_gpus(tmp_path)

    assert seen.kind == kind
    assert f"/{file}" in seen.reason or not kind


def test_discovery_by_environment(monkeypatch, tmp_path):
    monkeypatch.delenv(config.CPU_ONLY, raising=False)
    monkeypatch.setenv(config.GPU_KIND, "rocm")
    assert look_for_gpus(tmp_path) == Seen("rocm", "GPUCOLL_GPU_KIND says rocm")
    monkeypatch.setenv(config.GPU_KIND, "tpu")
    with pytest.raises(ArgumentError, match="must be cuda or rocm"):
        look_for_gpus(tmp_path)
    monkeypatch.setenv(config.CPU_ONLY, "1")
    assert look_for_gpus(tmp_path).kind == ""


def test_discovery_by_a_driver_that_is_loaded(monkeypatch, tmp_path):
    monkeypatch.delenv(config.CPU_ONLY, raising=False)
    maps = tmp_path / "proc/self/maps"
    maps.parent.mkdir(parents=True)
    maps.write_text("7f00-7f01 r-xp 00000000 08:01 42    /usr/lib/libcuda.so.550.54\n")
    assert look_for_gpus(tmp_path) == Seen("cuda", "its driver is in the process already")
