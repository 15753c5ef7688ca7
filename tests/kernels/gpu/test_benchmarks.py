"""The GPU benchmarks, on a device that is none: every case runs, and is counted right."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from gpucoll.arrays.buffer import Buffer
from gpucoll.kernels.gpu.launcher import CompiledKernel

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))
import gpu_benchmarks  # noqa: E402

sys.path.remove(str(ROOT / "tools"))

SIZE_BYTES = 64 << 10


class FakeDevice:
    """Memory of the host, and times that are set beforehand."""

    def __init__(self) -> None:
        self.copied: list[int] = []
        self.times: list[float] = []
        self.by_wall = 0

    def allocate(self, size_bytes: int) -> Buffer:
        memory = np.zeros(size_bytes + 256, np.uint8)
        address = -(-memory.ctypes.data // 256) * 256
        return Buffer(address, (size_bytes,), "uint8", 1, memory, "cpu:0", 0)

    def copy(self, destination: Buffer, source: Buffer, size_bytes: int) -> None:
        assert size_bytes <= min(destination.size_bytes, source.size_bytes)
        ctypes.memmove(destination.address, source.address, size_bytes)
        self.copied.append(size_bytes)

    def device_s(self, run) -> float:
        run()
        return self.times.pop(0) if self.times else 1e-6

    def wall_s(self, run) -> float:
        self.by_wall += 1
        return self.device_s(run)


GROUPS = {
    "reduce": lambda device: gpu_benchmarks.reduce_cases(device, (SIZE_BYTES,)),
    "cast": lambda device: gpu_benchmarks.cast_cases(device, (SIZE_BYTES,)),
    "pack": lambda device: gpu_benchmarks.pack_cases(device, 20, 40_000),
    "quantise": lambda device: gpu_benchmarks.quantise_cases(device, (SIZE_BYTES,)),
    "custom": lambda device: gpu_benchmarks.custom_cases(device, (SIZE_BYTES,)),
}


def test_groups():
    assert set(GROUPS) == set(gpu_benchmarks.GROUPS)


@pytest.mark.soak(quick=1)
@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("group", GROUPS)
def test_every_case_runs(group, monkeypatch, host_launcher):
    if group == "custom":  # compiled for a GPU: nothing to run here
        made = CompiledKernel("entry", "")
        monkeypatch.setattr("gpucoll.kernels.gpu.custom.custom_kernel", lambda *a: made)
        monkeypatch.setattr(type(host_launcher), "launch", lambda *a: None)
        monkeypatch.setattr(type(host_launcher), "compute_capability", lambda *a: (9, 0))
    device = FakeDevice()
    written: list[str] = []
    cases = list(GROUPS[group](device))
    monkeypatch.setattr(gpu_benchmarks, "REPETITIONS", 1)

    gpu_benchmarks.run_group(device, iter(cases), lambda done: written.append(json.dumps(done)))

    rows = json.loads(written[-1])
    assert len(written) == len(cases) == len({row["name"] for row in rows})
    for case, row in zip(cases, rows, strict=True):
        assert row["moved_bytes"] == case.moved_bytes > 0
        assert row["ratio"] == 1


def test_a_measurement():
    device = FakeDevice()
    warm = [9.0] * (2 * gpu_benchmarks.WARM_UPS)
    device.times = [*warm, 2.0, 4.0, 1.0, 1.0, 3.0, 5.0]
    ran: list[int] = []
    case = gpu_benchmarks.Case("case", 1000, lambda: ran.append(1), 0.9)

    measured = gpu_benchmarks.measure(device, case, repetitions=3)

    assert device.copied == [500] * (gpu_benchmarks.WARM_UPS + 3)  # 500 read, 500 written
    assert len(ran) == gpu_benchmarks.WARM_UPS + 3
    assert measured.against_times_s == [2.0, 1.0, 3.0]
    assert measured.times_s == [4.0, 1.0, 5.0]
    assert (measured.time_s, measured.against_s) == (4.0, 2.0)
    assert (measured.rate, measured.against_rate, measured.ratio) == (250, 500, 0.5)
    assert measured.against == "copy"


@pytest.mark.usefixtures("on_host")
def test_one_by_one_is_measured_by_the_hosts_clock():
    device = FakeDevice()
    (case,) = [each for each in GROUPS["pack"](device) if each.name == "pack 20 arrays, host time"]
    gpu_benchmarks.measure(device, case, 1)
    assert device.by_wall == 2 * (gpu_benchmarks.WARM_UPS + 1)
    assert len(device.copied) == 20 * (gpu_benchmarks.WARM_UPS + 1)
