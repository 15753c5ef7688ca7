"""Each rank's default GPU, under every way in which GPUs are hidden."""

from __future__ import annotations

import pytest

from gpucoll import config
from gpucoll.topology.default_gpu import DefaultGpu, default_gpu, visible_gpus

UUID = "GPU-ad536355-482f-a87c-b081-8523fb3971c4"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "0 1 2 3"),
        ("0,1", "0 1"),
        ("2, 0", "2 0"),
        ("", ""),
        ("-1", ""),
        ("NoDevFiles", ""),
        ("1,-1,2", "1"),
        ("1,9,2", "1"),
        ("1,1,2", "1"),
        (UUID, UUID),
        ("MIG-1/2/0", "MIG-1/2/0"),
    ],
)
def test_nvidia(text, expected):
    variables = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert visible_gpus("nvidia", 4, variables) == expected.split()


@pytest.mark.parametrize(
    ("rocr", "hip", "cuda", "expected"),
    [
        (None, None, None, "0 1 2 3"),
        ("3,2", None, None, "3 2"),
        (None, "1,3", None, "1 3"),
        (None, None, "1,3", "1 3"),
        (None, "2", "1,3", "2"),
        ("3,2", "1", None, "2"),
        ("3,2", "2", None, ""),
    ],
)
def test_amd(rocr, hip, cuda, expected):
    values = zip(("ROCR", "HIP", "CUDA"), (rocr, hip, cuda), strict=True)
    variables = {f"{name}_VISIBLE_DEVICES": text for name, text in values if text is not None}
    assert visible_gpus("amd", 4, variables) == expected.split()


def test_the_variables_of_amd_do_not_hide_nvidia():
    assert visible_gpus("nvidia", 2, {"HIP_VISIBLE_DEVICES": ""}) == ["0", "1"]


@pytest.mark.parametrize(
    ("local_rank", "text", "expected"),
    [
        (0, None, DefaultGpu(0, "0")),
        (3, None, DefaultGpu(3, "3")),
        (5, None, DefaultGpu(1, "1")),
        (1, "2,3", DefaultGpu(1, "3")),
        (3, "2", DefaultGpu(0, "2")),
        (1, UUID, DefaultGpu(0, UUID)),
        (0, "", None),
    ],
)
def test_default_gpu(local_rank, text, expected):
    variables = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert default_gpu(local_rank, "nvidia", 4, variables) == expected


def test_no_gpu():
    assert default_gpu(0, "amd", 0, {}) is None


def test_the_variables_come_from_the_environment(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert config.visible_devices() == {}
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    assert config.visible_devices() == {"HIP_VISIBLE_DEVICES": ""}
