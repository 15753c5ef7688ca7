"""How much memory is free, on machines made of files."""

from __future__ import annotations

import pytest

from gpucoll.topology.memory import free_memory_bytes

MIB = 1 << 20
V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "32 31 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


def machine(root, files, mount="", cgroup="0::/job"):
    """Write a made-up /proc and /sys."""
    meminfo = "MemTotal: 16777216 kB\nMemFree: 1024 kB\nMemAvailable: 8388608 kB\nSwapFree: 0 kB"
    proc = {"mountinfo": mount, "cgroup": cgroup}
    contents = {f"proc/self/{name}": text for name, text in proc.items()}
    for name, text in {"proc/meminfo": meminfo, **contents, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_what_the_machine_has(tmp_path):
    assert free_memory_bytes(machine(tmp_path, {})) == 8192 * MIB


def test_swap_space_counts(tmp_path):
    files = {"proc/meminfo": "MemAvailable: 1024 kB\nSwapFree: 2048 kB"}
    assert free_memory_bytes(machine(tmp_path, files)) == 3 * MIB


def test_version_2(tmp_path):
    """What is used but for the page cache, which the kernel gives up."""
    job = "sys/fs/cgroup/job"
    files = {
        f"{job}/memory.max": str(512 * MIB),
        f"{job}/memory.current": str(500 * MIB),
        f"{job}/memory.stat": f"anon 1\nshmem 2\nactive_file {30 * MIB}\ninactive_file {70 * MIB}",
    }
    assert free_memory_bytes(machine(tmp_path, files, V2)) == 112 * MIB


@pytest.mark.parametrize(("limit", "free"), [("max", 52), (str(20 * MIB), 32), ("0", 12)])
def test_version_2_with_swap_space(tmp_path, limit, free):
    job = "sys/fs/cgroup/job"
    files = {
        "proc/meminfo": "MemAvailable: 8388608 kB\nSwapFree: 40960 kB",
        f"{job}/memory.max": str(512 * MIB),
        f"{job}/memory.current": str(500 * MIB),
        f"{job}/memory.swap.max": limit,
        f"{job}/memory.swap.current": "0",
    }
    assert free_memory_bytes(machine(tmp_path, files, V2)) == free * MIB


def test_a_limit_further_up(tmp_path):
    files = {
        "sys/fs/cgroup/a/b/memory.max": "max",
        "sys/fs/cgroup/a/b/memory.current": str(100 * MIB),
        "sys/fs/cgroup/a/memory.max": str(200 * MIB),
        "sys/fs/cgroup/a/memory.current": str(150 * MIB),
    }
    assert free_memory_bytes(machine(tmp_path, files, V2, "0::/a/b")) == 50 * MIB


def test_version_1(tmp_path):
    job = "sys/fs/cgroup/memory/job"
    files = {
        f"{job}/memory.limit_in_bytes": str(512 * MIB),
        f"{job}/memory.usage_in_bytes": str(500 * MIB),
        f"{job}/memory.stat": f"active_file 1\ntotal_active_file {MIB}\ntotal_inactive_file {MIB}",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(9000 * MIB),
    }
    assert free_memory_bytes(machine(tmp_path, files, V1, "4:memory:/job")) == 14 * MIB


def test_more_used_than_allowed(tmp_path):
    job = "sys/fs/cgroup/job"
    files = {f"{job}/memory.max": str(MIB), f"{job}/memory.current": str(2 * MIB)}
    assert free_memory_bytes(machine(tmp_path, files, V2)) == 0


def test_unknown_without_proc(tmp_path):
    assert free_memory_bytes(tmp_path) is None


def test_this_machine():
    free_bytes = free_memory_bytes()
    assert free_bytes is not None
    assert free_bytes > MIB
