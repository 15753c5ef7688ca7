"""Which backend moves which arrays: the pure functions behind it."""

from __future__ import annotations

import itertools

import pytest

from gpucoll import config
from gpucoll.backends.choice import (
    DIRECT,
    KINDS,
    Found,
    ObstacleError,
    Pick,
    Seen,
    choose,
    instead,
    obstacle,
)
from gpucoll.backends.discovery import look_for_gpus
from gpucoll.errors import ArgumentError

CUDA, ROCM = Seen("cuda", "there is /dev/nvidiactl"), Seen("rocm", "there is /dev/kfd")
INTEL = Seen("sycl", "there is /dev/dri/renderD128")
NONE = Seen("", "nothing is there")
HOST = Seen("host", "GPUCOLL_DEVICE=host")
WITHOUT = ("cpu", "nccl", "rccl", "oneccl")
WITH = (*WITHOUT, "direct")


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
        ("auto", [INTEL] * 2, "cpu", "oneccl", "chosen by auto: there is /dev/dri/renderD128"),
        ("oneccl", [INTEL, NONE], "", "oneccl", "asked for"),
        ("oneccl", [HOST, HOST], "", "oneccl", "asked for"),
    ],
)
def test_choose(wish, seen, host, gpu, reason):
    choice = choose(wish, seen, WITHOUT)

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
    text = obstacle(backend, ranks, WITHOUT)

    assert said in text
    assert bool(text) == bool(said)


def test_an_obstacle_says_what_serves_instead():
    text = obstacle("nccl", [found(1)] * 2, WITH)
    assert "start one rank per GPU, or leave it to backend='auto', which takes direct" in text
    assert "direct" not in obstacle("nccl", [found(1)] * 2, WITHOUT)
    assert not obstacle("nccl", [found(1), found(2)], WITH)


@pytest.mark.parametrize(
    ("wish", "seen", "gpu", "reason"),
    [
        ("auto", [CUDA, CUDA], "nccl", "chosen by auto: there is /dev/nvidiactl"),
        ("auto", [CUDA, ROCM], "direct", "different vendors (cuda on rank 0, rocm on rank 1)"),
        ("auto", [HOST, HOST], "direct", "no vendor's library serves Host devices"),
        ("auto", [HOST, ROCM], "direct", "(host on rank 0, rocm on rank 1)"),
        ("auto", [CUDA, NONE], "", "no GPU on rank 1: nothing is there; start ranks only"),
        ("direct", [CUDA, ROCM], "direct", "asked for"),
        ("direct", [HOST], "direct", "asked for"),
        ("direct", [NONE, NONE], "", "no GPU: nothing is there"),
        ("direct", [CUDA, NONE], "", "no GPU on rank 1: nothing is there; start ranks only"),
        ("nccl", [HOST], "nccl", "asked for"),
        ("auto", [CUDA, INTEL], "", "different vendors (cuda on rank 0, sycl on rank 1)"),
        ("direct", [CUDA, INTEL], "", "rank 1: the direct backend does not serve Intel GPUs"),
    ],
)
def test_choose_where_direct_is_there(wish, seen, gpu, reason):
    choice = choose(wish, seen, WITH)

    assert choice.gpu.backend == gpu
    assert reason in choice.gpu.reason
    assert choice.host.backend == ("cpu" if wish == "auto" else "")


@pytest.mark.parametrize("served", [WITHOUT, WITH])
def test_whatever_three_ranks_see(served):
    """Every combination: auto takes what serves all ranks' kinds, and refuses else with a cause."""
    for seen in itertools.product([CUDA, ROCM, INTEL, HOST, NONE], repeat=3):
        for wish in ("auto", "cpu", *KINDS, DIRECT):
            host, gpu = choose(wish, seen, served)
            kinds = [item.kind for item in seen]
            assert host.reason
            assert gpu.reason
            assert host.backend == ("cpu" if wish in ("auto", "cpu") else "")
            assert len(gpu.kinds) == (3 if gpu.backend else 0)
            if wish == "auto":
                assert gpu.backend in (*served, "")
                has_way = "" not in kinds and ("sycl" not in kinds or set(kinds) == {"sycl"})
                assert bool(gpu.backend) == has_way or served is WITHOUT
                if gpu.backend in KINDS:
                    assert set(kinds) == {KINDS[gpu.backend]}
            if gpu.backend == DIRECT:
                assert list(gpu.kinds) == kinds
                assert not {"", "sycl"} & {*kinds}
            elif gpu.backend == "oneccl":
                assert list(gpu.kinds) == ["host" if kind == "host" else "sycl" for kind in kinds]
            elif gpu.backend:
                assert set(gpu.kinds) == {KINDS[gpu.backend]}


@pytest.mark.parametrize("wish", ["auto", DIRECT])
def test_mixed_takes_direct_for_all_arrays_whatever_the_ranks_see(wish):
    for seen in itertools.product([CUDA, ROCM, INTEL, HOST, NONE], repeat=3):
        host, gpu = choose(wish, seen, mixed=True)
        assert host.backend == gpu.backend == DIRECT
        on_host = ("", "sycl")  # the direct backend does not serve Intel GPUs
        assert list(gpu.kinds) == ["cpu" if item.kind in on_host else item.kind for item in seen]
    shown = choose(wish, [CUDA, NONE, ROCM, NONE], mixed=True).gpu.reason
    assert shown == "mixed=True: host arrays alone on ranks 1, 3, cuda on rank 0, rocm on rank 2"


@pytest.mark.parametrize("wish", ["auto", "nccl"])
@pytest.mark.parametrize("has_gpus", [True, False])
@pytest.mark.parametrize("served", [WITHOUT, WITH])
def test_what_serves_instead_of_a_library(wish, has_gpus, served):
    pick = Pick("nccl", "chosen by auto: there is /dev/nvidiactl", ("cuda", "cuda"))

    other = instead(wish, ObstacleError("ranks 0, 1 share one GPU", has_gpus), pick, served)

    if (wish, has_gpus, served) == ("auto", True, WITH):
        reason = "chosen by auto when the GPUs connected: ranks 0, 1 share one GPU"
        assert other == Pick("direct", reason, ("cuda", "cuda"))
    else:
        assert other is None


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


@pytest.mark.parametrize(
    ("vendor", "has_node", "kind"),
    [("0x8086\n", True, "sycl"), ("0x8086\n", False, ""), ("0x10de\n", True, "")],
)
def test_discovery_of_intel(monkeypatch, tmp_path, vendor, has_node, kind):
    """Render nodes are of every vendor: sysfs tells whose; a container may lack the file."""
    monkeypatch.delenv(config.CPU_ONLY, raising=False)
    said, node = tmp_path / "sys/class/drm/renderD129/device/vendor", "dev/dri/renderD129"
    for path in (said, tmp_path / node):
        path.parent.mkdir(parents=True)
    said.write_text(vendor)
    if has_node:
        (tmp_path / node).touch()

    seen = look_for_gpus(tmp_path)

    assert seen.kind == kind
    assert f"/{node}, of an Intel GPU" in seen.reason or not kind


def test_an_intel_gpu_has_no_other_backend():
    pick = Pick("oneccl", "chosen by auto", ("sycl", "sycl"))
    assert instead("auto", ObstacleError("no oneCCL", has_gpus=True), pick, WITH) is None
    assert "direct" not in obstacle("oneccl", [found(1)] * 2, WITH)


def test_discovery_by_environment(monkeypatch, tmp_path):
    monkeypatch.delenv(config.CPU_ONLY, raising=False)
    monkeypatch.setenv(config.GPU_KIND, "rocm")
    assert look_for_gpus(tmp_path) == Seen("rocm", "GPUCOLL_GPU_KIND=rocm")
    monkeypatch.setenv(config.GPU_KIND, "tpu")
    with pytest.raises(ArgumentError, match="must be one of cuda, rocm, sycl"):
        look_for_gpus(tmp_path)
    monkeypatch.setenv(config.CPU_ONLY, "1")
    assert look_for_gpus(tmp_path).kind == ""


def test_discovery_by_a_driver_that_is_loaded(monkeypatch, tmp_path):
    monkeypatch.delenv(config.CPU_ONLY, raising=False)
    maps = tmp_path / "proc/self/maps"
    maps.parent.mkdir(parents=True)
    maps.write_text("7f00-7f01 r-xp 00000000 08:01 42    /usr/lib/libcuda.so.550.54\n")
    assert look_for_gpus(tmp_path) == Seen("cuda", "its driver is in the process already")
