"""Usable CPUs and their sharing out, on machines made of files."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from gpucoll.topology import (
    cpu_quota,
    cpu_sets,
    cpus,
    parse_cpu_list,
    usable_cpu_count,
    usable_cpus,
)

V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"


def machine(root, *, mounts=(), cgroup="", files=None):
    """Write a made-up /proc and whatever else is asked for; return the root."""
    contents = {"proc/self/mountinfo": "\n".join(mounts), "proc/self/cgroup": cgroup}
    for name, text in {**contents, **(files or {})}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def cpu_files(cpus):
    """Return sysfs files for {cpu: (package, node, cache, core)}; equal numbers share a unit."""
    files = {}
    for cpu, (package, _, cache, core) in cpus.items():
        folder = f"sys/devices/system/cpu/cpu{cpu}"
        files[f"{folder}/topology/physical_package_id"] = str(package)
        siblings = [str(other) for other, place in cpus.items() if place[3] == core]
        files[f"{folder}/topology/thread_siblings_list"] = ",".join(siblings)
        shared = [str(other) for other, place in cpus.items() if place[2] == cache]
        files[f"{folder}/cache/index3/shared_cpu_list"] = ",".join(shared)
    for node in {place[1] for place in cpus.values()}:
        members = [str(cpu) for cpu, place in cpus.items() if place[1] == node]
        files[f"sys/devices/system/node/node{node}/cpulist"] = ",".join(members)
    return files


class TestUsableCpus:
    def test_is_the_affinity_mask(self):
        assert usable_cpus() == os.sched_getaffinity(0)

    def test_follows_a_narrower_mask(self):
        code = (
            "import os; from gpucoll.topology import *; cpu = min(usable_cpus());"
            "os.sched_setaffinity(0, {cpu}); print(usable_cpus() == {cpu}, usable_cpu_count())"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        assert result.stdout == b"True 1\n"

    def test_imports_nothing_that_takes_time(self):
        code = (
            "import runpy, sys; runpy.run_path(sys.argv[1]);"
            "print({m.partition('.')[0] for m in sys.modules} - sys.stdlib_module_names)"
        )
        command = [sys.executable, "-I", "-S", "-c", code, cpus.__file__]
        result = subprocess.run(command, capture_output=True, check=True)
        assert result.stdout in (b"{'__main__'}\n", b"set()\n")


class TestCpuQuota:
    def test_none_without_proc(self, tmp_path):
        assert cpu_quota(tmp_path) is None

    def test_version_2(self, tmp_path):
        files = {"sys/fs/cgroup/job/cpu.max": "250000 100000"}
        root = machine(tmp_path, mounts=[V2_MOUNT], cgroup="0::/job", files=files)
        assert cpu_quota(root) == 2.5

    def test_version_2_without_a_limit(self, tmp_path):
        files = {"sys/fs/cgroup/job/cpu.max": "max 100000"}
        root = machine(tmp_path, mounts=[V2_MOUNT], cgroup="0::/job", files=files)
        assert cpu_quota(root) is None

    def test_the_smallest_on_the_way_up_counts(self, tmp_path):
        files = {
            "sys/fs/cgroup/a/b/c/cpu.max": "800000 100000",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000",
            "sys/fs/cgroup/a/cpu.max": "150000 50000",
        }
        root = machine(tmp_path, mounts=[V2_MOUNT], cgroup="0::/a/b/c", files=files)
        assert cpu_quota(root) == 3.0

    def test_a_neighbour_does_not_count(self, tmp_path):
        files = {"sys/fs/cgroup/other/cpu.max": "100000 100000"}
        root = machine(tmp_path, mounts=[V2_MOUNT], cgroup="0::/mine", files=files)
        assert cpu_quota(root) is None

    def test_version_1(self, tmp_path):
        folder = "sys/fs/cgroup/cpu,cpuacct/docker/x"
        files = {f"{folder}/cpu.cfs_quota_us": "50000", f"{folder}/cpu.cfs_period_us": "100000"}
        cgroup = "5:memory:/elsewhere\n4:cpu,cpuacct:/docker/x\n1:name=systemd:/"
        root = machine(tmp_path, mounts=[V1_MOUNT], cgroup=cgroup, files=files)
        assert cpu_quota(root) == 0.5

    def test_version_1_without_a_limit(self, tmp_path):
        folder = "sys/fs/cgroup/cpu,cpuacct"
        files = {f"{folder}/cpu.cfs_quota_us": "-1", f"{folder}/cpu.cfs_period_us": "100000"}
        root = machine(tmp_path, mounts=[V1_MOUNT], cgroup="4:cpu,cpuacct:/", files=files)
        assert cpu_quota(root) is None

    def test_both_versions_at_once(self, tmp_path):
        folder = "sys/fs/cgroup/cpu,cpuacct/x"
        files = {
            f"{folder}/cpu.cfs_quota_us": "300000",
            f"{folder}/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/unified/y/cpu.max": "200000 100000",
        }
        unified = V2_MOUNT.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")
        cgroup = "4:cpu,cpuacct:/x\n0::/y"
        root = machine(tmp_path, mounts=[V1_MOUNT, unified], cgroup=cgroup, files=files)
        assert cpu_quota(root) == 2.0

    def test_a_container_whose_mount_shows_its_own_cgroup_as_the_top(self, tmp_path):
        mount = V1_MOUNT.replace(" / /sys", " /docker/x /sys")
        folder = "sys/fs/cgroup/cpu,cpuacct"
        files = {
            f"{folder}/cpu.cfs_quota_us": "150000",
            f"{folder}/cpu.cfs_period_us": "100000",
            f"{folder}/inner/cpu.cfs_quota_us": "-1",
            f"{folder}/inner/cpu.cfs_period_us": "100000",
        }
        cgroup = "4:cpu,cpuacct:/docker/x/inner"
        root = machine(tmp_path, mounts=[mount], cgroup=cgroup, files=files)
        assert cpu_quota(root) == 1.5

    @pytest.mark.parametrize("path", ["/../elsewhere", "/not/below/the/mount"])
    def test_a_cgroup_that_the_mount_does_not_show(self, tmp_path, path):
        mount = V2_MOUNT.replace(" / /sys", " /shown /sys")
        files = {"sys/fs/cgroup/cpu.max": "400000 100000"}
        root = machine(tmp_path, mounts=[mount], cgroup=f"0::{path}", files=files)
        assert cpu_quota(root) == 4.0

    def test_a_mount_point_with_a_space(self, tmp_path):
        mount = V2_MOUNT.replace("/sys/fs/cgroup ", r"/my\040groups ")
        files = {"my groups/job/cpu.max": "100000 100000"}
        root = machine(tmp_path, mounts=[mount], cgroup="0::/job", files=files)
        assert cpu_quota(root) == 1.0

    @pytest.mark.parametrize("text", ["", "nonsense", "1", "1 2 3", "100000 0", "x 100000"])
    def test_nonsense_limits_nothing(self, tmp_path, text):
        files = {"sys/fs/cgroup/cpu.max": text}
        root = machine(tmp_path, mounts=[V2_MOUNT, "garbage", ""], cgroup="0::/", files=files)
        assert cpu_quota(root) is None

    @pytest.mark.parametrize(("quota_us", "expected"), [(10000, 1), (199999, 1), (200000, 2)])
    def test_the_count_is_rounded_down_to_at_least_one(
        self, tmp_path, monkeypatch, quota_us, expected
    ):
        monkeypatch.setattr(cpus, "usable_cpus", lambda: frozenset(range(8)))
        files = {"sys/fs/cgroup/cpu.max": f"{quota_us} 100000"}
        root = machine(tmp_path, mounts=[V2_MOUNT], cgroup="0::/", files=files)
        assert usable_cpu_count(root) == expected

    def test_the_count_is_the_masks_where_the_quota_is_larger(self, tmp_path, monkeypatch):
        monkeypatch.setattr(cpus, "usable_cpus", lambda: frozenset({3, 5}))
        files = {"sys/fs/cgroup/cpu.max": "6400000 100000"}
        root = machine(tmp_path, mounts=[V2_MOUNT], cgroup="0::/", files=files)
        assert usable_cpu_count(root) == 2


class TestCpuSets:
    def test_fewer_cpus_than_ranks_binds_nobody(self, tmp_path):
        assert cpu_sets(3, {0, 1}, tmp_path) == []

    def test_without_sysfs_cpus_are_independent(self, tmp_path):
        assert cpu_sets(2, {7, 4, 5, 6}, tmp_path) == [{4, 5}, {6, 7}]

    def test_one_rank_gets_all(self, tmp_path):
        assert cpu_sets(1, {0, 1, 2}, tmp_path) == [{0, 1, 2}]

    @pytest.mark.parametrize(
        ("ranks", "expected"),
        [(2, [{0, 2}, {1, 3}]), (3, [{0}, {2}, {1, 3}]), (4, [{0}, {2}, {1}, {3}])],
    )
    def test_physical_cores_first(self, tmp_path, ranks, expected):
        # The usual numbering: CPU 2 is the second thread of CPU 0's core.
        cpus = {0: (0, 0, 0, 0), 1: (0, 0, 0, 1), 2: (0, 0, 0, 0), 3: (0, 0, 0, 1)}
        assert cpu_sets(ranks, cpus, machine(tmp_path, files=cpu_files(cpus))) == expected

    def test_a_core_of_which_one_thread_is_usable(self, tmp_path):
        cpus = {0: (0, 0, 0, 0), 1: (0, 0, 0, 1), 2: (0, 0, 0, 0), 3: (0, 0, 0, 1)}
        root = machine(tmp_path, files=cpu_files(cpus))
        assert cpu_sets(2, {0, 1, 3}, root) == [{0}, {1, 3}]

    @pytest.mark.parametrize(
        ("ranks", "expected"),
        [
            (2, [{0, 2, 4, 6}, {1, 3, 5, 7}]),
            (3, [{0, 2}, {4, 6}, {1, 3, 5, 7}]),
            (4, [{0, 2}, {4, 6}, {1, 3}, {5, 7}]),
        ],
    )
    def test_numa_neighbours_stay_together(self, tmp_path, ranks, expected):
        cpus = {cpu: (cpu % 2, cpu % 2, cpu % 2, cpu) for cpu in range(8)}
        assert cpu_sets(ranks, cpus, machine(tmp_path, files=cpu_files(cpus))) == expected

    def test_ranks_go_to_nodes_by_their_size(self, tmp_path):
        # Of the second node only one core is usable.
        cpus = {cpu: (0, cpu // 4, cpu // 4, cpu) for cpu in range(5)}
        root = machine(tmp_path, files=cpu_files(cpus))
        assert cpu_sets(4, cpus, root) == [{0}, {1}, {2, 3}, {4}]

    def test_a_small_node_gives_its_core_before_any_core_is_shared(self, tmp_path):
        # Node 0: one core of four threads. Node 1: three cores of one thread.
        cpus = dict.fromkeys(range(4), (0, 0, 0, 0))
        cpus |= {cpu: (0, 1, 4, cpu) for cpu in range(4, 7)}
        root = machine(tmp_path, files=cpu_files(cpus))
        assert cpu_sets(4, cpus, root) == [{0, 1, 2, 3}, {4}, {5}, {6}]

    def test_caches_stay_together(self, tmp_path):
        cpus = {cpu: (0, 0, cpu // 3, cpu) for cpu in range(12)}
        root = machine(tmp_path, files=cpu_files(cpus))
        assert cpu_sets(2, cpus, root) == [set(range(6)), set(range(6, 12))]
        assert cpu_sets(4, cpus, root)[1] == {3, 4, 5}

    @pytest.mark.soak(quick=13)
    @pytest.mark.parametrize("seed", range(40))
    def test_sets_are_disjoint_and_use_every_cpu(self, tmp_path, seed):
        chance = random.Random(seed)
        threads, cores, nodes = (chance.randint(1, top) for top in (4, 5, 4))
        places = [
            (node // 2, node, (node, core // 2), (node, core))
            for node in range(nodes)
            for core in range(cores)
            for _ in range(threads)
        ]
        chance.shuffle(places)
        cpus = dict(enumerate(places))
        root = machine(tmp_path, files=cpu_files(cpus))
        usable = chance.sample(range(len(cpus)), chance.randint(1, len(cpus)))
        for ranks in range(1, len(usable) + 1):
            sets = cpu_sets(ranks, usable, root)
            assert len(sets) == ranks
            assert all(sets)
            assert sorted(cpu for cpu_set in sets for cpu in cpu_set) == sorted(usable)
            if ranks <= len({places[cpu][3] for cpu in usable}):
                users = [{places[cpu][3] for cpu in cpu_set} for cpu_set in sets]
                assert sum(map(len, users)) == len(set().union(*users)), "a core is shared"


@pytest.mark.parametrize(
    ("text", "cpus"), [("", []), ("\n", []), ("3\n", [3]), ("0-2,8,10-11\n", [0, 1, 2, 8, 10, 11])]
)
def test_parse_cpu_list(text, cpus):
    assert parse_cpu_list(text) == cpus
