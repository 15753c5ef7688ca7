"""What each probe reads, on hosts made of files."""

from __future__ import annotations

import json
import os
import sys

import pytest
from tests.doubles import run_python
from tests.topology.machines import write

from gpucoll.doctor import host, libraries, network
from gpucoll.doctor.gpus import kernel_module, toolkit
from gpucoll.doctor.host import cpu_list

V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
V1_MOUNT = "32 31 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([2, 0, 1], "0-2"), ([0, 1, 4, 6, 7], "0-1,4,6-7")]
)
def test_cpu_list(numbers, text):
    assert cpu_list(numbers) == text


class TestCpus:
    def test_this_machine(self):
        found = host.cpus()
        assert found["usable_count"] == len(os.sched_getaffinity(0))
        assert found["usable"] == cpu_list(os.sched_getaffinity(0))
        assert found["numa_nodes"] >= 1

    def test_a_quota(self, tmp_path):
        write(tmp_path / "proc/self/mountinfo", V2_MOUNT)
        write(tmp_path / "proc/self/cgroup", "0::/job")
        write(tmp_path / "sys/fs/cgroup/job/cpu.max", "50000 100000")
        write(tmp_path / "proc/cpuinfo", "processor : 0\nmodel name\t: A  CPU\nflags : x")
        found = host.cpus(tmp_path)
        assert (found["quota"], found["ranks_at_once"]) == (0.5, 1)
        assert found["model"] == "A  CPU"


class TestMemory:
    def test_this_machine(self):
        found = host.memory()
        assert found["shared_memory_problem"] is None
        assert found["available_bytes"] is not None
        assert found["total_bytes"] is not None
        assert 0 < found["available_bytes"] <= found["total_bytes"]

    def test_a_container_without_dev_shm(self, tmp_path):
        found = host.memory(tmp_path)
        assert (found["dev_shm_bytes"], found["dev_shm_free_bytes"]) == (None, None)
        assert (found["total_bytes"], found["limit_bytes"], found["ptrace_scope"]) == (None,) * 3

    @pytest.mark.parametrize(
        ("mount", "cgroup", "file", "text", "expected"),
        [
            (V2_MOUNT, "0::/job", "job/memory.max", "1073741824", 1 << 30),
            (V2_MOUNT, "0::/job", "memory.max", "4096", 4096),
            (V2_MOUNT, "0::/job", "job/memory.max", "max", None),
            (V1_MOUNT, "4:memory:/job", "memory/job/memory.limit_in_bytes", "8192", 8192),
            (V1_MOUNT, "4:memory:/", "memory/memory.limit_in_bytes", "9223372036854771712", None),
        ],
    )
    def test_the_cgroups_limit(self, tmp_path, mount, cgroup, file, text, expected):
        write(tmp_path / "proc/self/mountinfo", mount)
        write(tmp_path / "proc/self/cgroup", cgroup)
        write(tmp_path / "sys/fs/cgroup" / file, text)
        assert host.memory(tmp_path)["limit_bytes"] == expected

    def test_memfd_is_forbidden(self, monkeypatch):
        def refuse(*_):
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "memfd_create", refuse)
        found = host.memory()
        assert "Operation not permitted" in (found["memfd_problem"] or "")
        assert found["shared_memory_problem"] is None  # a file without a name serves as well


class TestPackages:
    def install(self, folder, name, version, files=()):
        write(
            folder / f"{name.replace('-', '_')}-{version}.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}",
        )
        for path, text in dict(files).items():
            write(folder / path, text)

    @pytest.fixture
    def site(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        return tmp_path

    def test_none(self, site):
        assert {package["version"] for package in host.packages()} == {None}
        assert [package["name"] for package in host.packages()] == list(host.PACKAGES)

    def test_several_distributions_of_one_package(self, site):
        self.install(site, "cupy-cuda12x", "13.0")
        self.install(site, "cupy_cuda13x", "14.0")
        self.install(site, "cupyx-tools", "1.0")
        found = [x["distribution"] for x in host.packages() if x["name"] == "CuPy"]
        assert found == ["cupy-cuda12x", "cupy-cuda13x"]

    @pytest.mark.parametrize(
        ("text", "built_for"),
        [
            ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None", "CUDA 12.8"),
            ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4.43482'", "ROCm 6.4"),
            ("cuda: Optional[str] = None\nhip: Optional[str] = None", "CPU"),
        ],
    )
    def test_what_pytorch_was_built_for(self, site, text, built_for):
        self.install(site, "torch", "2.8.0", {"torch/version.py": text})
        (found,) = (x for x in host.packages() if x["name"] == "PyTorch")
        assert (found["version"], found["built_for"]) == ("2.8.0", built_for)


class TestDrivers:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", (None, None)),
            ("NVRM: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue", ("550.54.15", False)),
            ("NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  R", ("570.86.15", True)),
        ],
    )
    def test_the_kernel_module_of_nvidia(self, tmp_path, text, expected):
        write(tmp_path / "proc/driver/nvidia/version", text)
        assert kernel_module("cuda", tmp_path) == expected

    def test_the_kernel_module_of_amd(self, tmp_path):
        assert kernel_module("rocm", tmp_path) == (None, None)
        (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
        assert kernel_module("rocm", tmp_path) == ("part of the kernel", True)
        write(tmp_path / "sys/module/amdgpu/version", "6.12.12")
        assert kernel_module("rocm", tmp_path) == ("6.12.12", True)

    def test_toolkits(self, tmp_path):
        assert toolkit("cuda", tmp_path) is toolkit("rocm", tmp_path) is None
        write(tmp_path / "usr/local/cuda/version.json", '{"cuda": {"version": "12.8.0"}}')
        write(tmp_path / "opt/rocm/.info/version", "7.0.1-38")
        assert toolkit("cuda", tmp_path) == "12.8.0"
        assert toolkit("rocm", tmp_path) == "7.0.1-38"
        write(tmp_path / "usr/local/cuda/version.json", "[]")
        assert toolkit("cuda", tmp_path) is None


class TestLibraries:
    def candidates(self, **variables):
        """Return what a new process finds: PyTorch may have loaded a copy into this one."""
        program = "print(json.dumps(libraries.candidates()))"
        imports = "import json; from gpucoll.doctor import libraries; "
        return json.loads(run_python(imports + program, **variables))

    def test_a_path_of_the_user_comes_first_even_if_nothing_is_there(self, tmp_path):
        found = self.candidates(GPUCOLL_NCCL_LIBRARY=str(tmp_path / "libnccl.so.2"))
        first = next(x for x in found if x["name"] == "NCCL")
        assert first["path"] == str(tmp_path / "libnccl.so.2")

    def test_a_file_that_is_no_library(self, tmp_path):
        (tmp_path / "libnccl.so.2").write_text("no ELF")
        found = libraries.look("NCCL", str(tmp_path / "libnccl.so.2"))
        assert found["version"] is None
        assert "libnccl.so.2" in (found["problem"] or "")

    def test_mpi_that_is_not_there(self):
        found = libraries.look("MPI", "libmpi.so.123")
        assert "libmpi.so.123" in (found["problem"] or "")

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("MPICH Version:\t5.0.2\nMPICH Release date:\tx", "MPICH 5.0.2"),
            ("Open MPI v5.0.11, package: Open MPI", "Open MPI 5.0.11"),
            ("Intel(R) MPI Library 2021.18.1 for Linux* OS", "Intel MPI 2021.18.1"),
            (
                "Some MPI of a vendor, whose text is longer than a label\nmore",
                "Some MPI of a vendor",
            ),
        ],
    )
    def test_versions_of_mpi(self, text, expected):
        assert libraries.mpi_version(text).startswith(expected)
        assert len(libraries.mpi_version(text)) <= 40

    def candidate(self, path, name="NCCL", source="the wheel on Python's path"):
        return {"name": name, "path": path, "source": source}

    def look(self, path, version="2.28.9", problem=None):
        return ({"path": path, "version": version, "problem": problem}, None)

    def test_the_first_is_used_and_others_are_shown(self):
        found = libraries.merged(
            [self.candidate("/a"), self.candidate("/b")], [self.look("/a"), self.look("/b")]
        )
        assert [(x["path"], x["is_used"]) for x in found] == [("/a", True), ("/b", False)]

    def test_a_worse_one_is_not_taken_quietly(self):
        found = libraries.merged(
            [self.candidate("/a"), self.candidate("/b")],
            [self.look("/a", None, "too old"), self.look("/b")],
        )
        assert [(x["path"], x["is_used"]) for x in found] == [("/a", False), ("/b", False)]

    def test_the_loader_finds_nothing_or_the_same_file_again(self):
        wheel, name = self.candidate("/a"), self.candidate("libnccl.so.2", source="loader")
        missing = self.look("libnccl.so.2", None, "cannot open shared object file")
        assert len(libraries.merged([wheel, name], [self.look("/a"), missing])) == 1
        assert len(libraries.merged([wheel, name], [self.look("/a"), self.look("/a")])) == 1

    def test_one_that_gave_no_answer(self):
        (found,) = libraries.merged([self.candidate("/a")], [(None, "no answer within 2 s")])
        assert (found["path"], found["problem"]) == ("/a", "no answer within 2 s")

    def test_a_copy_elsewhere_is_shown_but_never_used(self):
        source = libraries.NOT_LOOKED_FOR
        (found,) = libraries.merged([self.candidate("/a", source=source)], [self.look("/a")])
        assert found["is_used"] is False

    def test_the_real_wheel(self):
        pytest.importorskip("nvidia.nccl", reason="needs the wheel nvidia-nccl-cu12 or -cu13")
        wheel = next(x for x in self.candidates() if "wheel" in x["source"])
        found = libraries.look("NCCL", wheel["path"])
        assert found["problem"] is None
        assert (found["version"] or "").startswith("2.")


class TestGpuNetwork:
    def test_what_gpucoll_would_set(self, tmp_path, monkeypatch):
        monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
        monkeypatch.setenv("GPUCOLL_INTERFACES", "lo")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert network.gpu_network(tmp_path) == {
            "interface": "lo",
            "socket_ifname": "=lo",
            "socket_ifname_source": "gpucoll",
            "ib_hca": None,
            "ib_hca_source": None,
        }

    def test_what_the_user_says_stands(self, tmp_path, monkeypatch):
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
        monkeypatch.setenv("GPUCOLL_INTERFACES", "nothing9")
        write(tmp_path / "etc/nccl.conf", "NCCL_IB_HCA=mlx5_1")
        assert network.gpu_network(tmp_path) == {
            "interface": None,
            "socket_ifname": "ib0",
            "socket_ifname_source": "the environment",
            "ib_hca": "mlx5_1",
            "ib_hca_source": "/etc/nccl.conf",
        }
