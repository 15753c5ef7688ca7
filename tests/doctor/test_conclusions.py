"""What the doctor concludes on known machines: choice of backends, advice, verdict."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.doctor.environments import WHEEL, amd, laptop, nvidia

from gpucoll.backends import BACKENDS
from gpucoll.doctor.advice import CUDA_EXTRAS
from gpucoll.doctor.choice import choices
from gpucoll.doctor.findings import sections

WITHOUT, WITH = ("cpu", "nccl", "rccl"), ("cpu", "nccl", "rccl", "direct")
DIRECT = "direct" if "direct" in BACKENDS else None
"""What serves where no vendor's library does, in this version."""


def commands(report):
    return [advice["command"] for advice in report["advice"]]


def advice_of(report, what):
    return next(advice for advice in report["advice"] if advice["what"] == what)


def chosen(environment):
    """Return arrays -> what is chosen for them."""
    return {row["arrays"]: row for row in environment.report()["auto"]}


class TestNoGpu:
    def test_all_is_well_and_nothing_is_to_do(self):
        report = laptop().report()
        assert report["cpu_path_works"] is True
        assert report["advice"] == report["problems"] == report["default_gpus"] == []

    def test_host_arrays_are_served_and_gpu_arrays_are_not(self):
        rows = chosen(laptop())
        assert rows["host arrays"]["backend"] == "cpu"
        assert rows["GPU arrays"]["backend"] is None
        assert "no GPU" in rows["GPU arrays"]["reason"]


class TestNvidiaWithoutNccl:
    @pytest.mark.parametrize(
        ("interface", "command"),
        [
            ("12.8", "pip install 'gpucoll[cuda12]'"),
            ("13.0", "pip install 'gpucoll[cuda13]'"),
            ("14.1", "pip install 'gpucoll[cuda13]'"),
        ],
    )
    def test_the_extra_fits_the_driver_and_is_said_once(self, interface, command):
        assert commands(nvidia(interface).report()) == [command]

    def test_users_of_pytorch_need_no_cupy(self):
        environment = nvidia()
        environment.install("PyTorch", "torch", "2.8.0", "CUDA 12.8")
        assert commands(environment.report()) == ["pip install nvidia-nccl-cu12"]

    def test_pytorch_for_the_cpu_is_no_library_for_gpus(self):
        environment = nvidia()
        environment.install("PyTorch", "torch", "2.8.0", "CPU")
        assert commands(environment.report()) == ["pip install 'gpucoll[cuda12]'"]

    def test_a_driver_that_is_too_old(self):
        report = nvidia("11.4").report()
        assert "supports CUDA 11.4" in advice_of(report, "NVIDIA driver")["why"]
        assert not any("gpucoll[" in (command or "") for command in commands(report))

    def test_gpu_arrays_are_refused_with_the_reason(self):
        row = chosen(nvidia())["GPU arrays"]
        assert row["backend"] == DIRECT
        assert "NCCL cannot be used" in row["reason"]


def rows_of(environment, served):
    """Return arrays -> backend and reason, where there are these backends."""
    rows = choices(True, environment["gpus"], environment["libraries"], served)
    return {row["arrays"]: (row["backend"], row["reason"]) for row in rows}


class TestDirect:
    @pytest.mark.parametrize(("served", "backend"), [(WITHOUT, None), (WITH, "direct")])
    def test_it_serves_where_there_is_no_library(self, served, backend):
        found, reason = rows_of(nvidia(), served)["GPU arrays"]
        assert found == backend
        assert "NCCL cannot be used" in reason

    @pytest.mark.parametrize(("served", "backend"), [(WITHOUT, None), (WITH, "direct")])
    def test_it_serves_ranks_that_share_a_gpu(self, served, backend):
        environment = nvidia()
        environment.add_library()
        rows = rows_of(environment, served)
        assert rows["GPU arrays"][0] == "nccl"
        assert rows["shared GPU"][0] == backend
        assert "share one GPU (NVIDIA H100" in rows["shared GPU"][1]

    def test_it_serves_host_devices(self):
        environment = laptop()
        environment["gpus"].update(kind="host", kind_reason="GPUCOLL_DEVICE says host")
        rows = rows_of(environment, WITH)
        assert rows["GPU arrays"][0] == rows["shared GPU"][0] == "direct"
        assert rows_of(environment, WITHOUT)["GPU arrays"][0] is None

    def test_what_an_amd_gpu_is_told(self):
        environment = amd()
        environment["libraries"].clear()
        found, reason = rows_of(environment, WITH)["GPU arrays"]
        assert found == "direct"
        assert "never been executed on an AMD GPU" in reason

    def test_what_an_intel_gpu_is_told(self):
        environment = laptop()
        environment["gpus"].update(kind="sycl", kind_reason="there is /dev/dri/renderD128")
        found, reason = rows_of(environment, WITH)["GPU arrays"]
        assert found is None
        assert reason == "oneccl would be chosen, but oneCCL cannot be used (see below)"
        environment.add_library(name="oneCCL", version="2022.2.0")
        found, reason = rows_of(environment, WITH)["GPU arrays"]
        assert found == "oneccl"
        assert reason.startswith("one GPU per rank, through oneCCL 2022.2.0 (chosen by auto: there")
        assert reason.endswith("; gpucoll has never been executed on an Intel GPU")
        shown = dict(sections(environment.report()))
        (line,) = (line for line in shown["GPUs"] if line.label == "Intel GPU")
        assert "/dev/dri/renderD128; gpucoll has never been executed" in line.text
        assert "oneCCL 2022.2.0" in [line.label for line in shown["Libraries"]]


@pytest.mark.parametrize(
    ("environment", "said"),
    [(nvidia, "compiled by NVRTC 12.8 (/usr"), (amd, "compiled by hipRTC, which cannot be")],
)
def test_what_compiles_the_kernels(environment, said):
    lines = dict(sections(environment().report()))["GPUs"]
    assert said in next(line.text for line in lines if line.label == "GPU kernels")


@pytest.mark.parametrize("extra", ["rocm", *(extra for _, extra in CUDA_EXTRAS)])
def test_the_extras_that_are_advised_exist(extra):
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(rf"^{extra} = \[", text, re.MULTILINE)


class TestNvidiaWithNccl:
    def environment(self, **facts):
        environment = nvidia()
        environment.add_library(**facts)
        environment.install("NCCL wheel", "nvidia-nccl-cu12", "2.28.9")
        environment.install("CuPy", "cupy-cuda12x", "14.0.1")
        return environment

    def test_it_is_chosen_and_nothing_is_to_do(self):
        environment = self.environment()
        assert chosen(environment)["GPU arrays"]["backend"] == "nccl"
        assert "NCCL 2.28.9" in chosen(environment)["GPU arrays"]["reason"]
        assert environment.report()["advice"] == []

    @pytest.mark.parametrize(
        ("version", "hint"), [("2.28.9", "2.30.0 and later"), ("2.30.4", "MULTI_RANK_GPU_ENABLE")]
    )
    def test_several_ranks_on_a_gpu_are_refused(self, version, hint):
        row = chosen(self.environment(version=version))["shared GPU"]
        assert row["backend"] == DIRECT
        assert hint in row["reason"]

    def test_sharing_that_the_environment_allows(self):
        environment = self.environment(version="2.30.4")
        environment["gpus"]["may_share"] = True
        assert chosen(environment)["shared GPU"]["backend"] == "nccl"

    def test_two_copies_are_told_with_paths_versions_and_which_is_used(self):
        environment = self.environment()
        other = "/usr/lib/x86_64-linux-gnu/libnccl.so.2"
        environment.add_library(other, "2.18.5", is_used=False)
        why = advice_of(environment.report(), "two copies of NCCL")["why"]
        assert f"2.28.9 ({WHEEL}, used)" in why
        assert f"2.18.5 ({other})" in why

    def test_two_copies_of_one_version_are_no_problem(self):
        environment = self.environment()
        environment.add_library("/elsewhere/libnccl.so.2", is_used=False)
        assert environment.report()["advice"] == []

    def test_both_wheels_overwrite_each_other(self):
        environment = self.environment()
        environment.install("NCCL wheel", "nvidia-nccl-cu13", "2.28.9")
        command = advice_of(environment.report(), "NCCL wheels")["command"]
        assert command == (
            "pip uninstall -y nvidia-nccl-cu12 nvidia-nccl-cu13 && pip install nvidia-nccl-cu12"
        )

    def test_a_wheel_for_a_newer_cuda_than_the_driver_serves(self):
        environment = self.environment()
        environment.found["packages"] = [
            x for x in environment["packages"] if x["name"] != "NCCL wheel"
        ]
        environment.install("NCCL wheel", "nvidia-nccl-cu13", "2.28.9")
        assert commands(environment.report()) == [
            "pip uninstall -y nvidia-nccl-cu13 && pip install nvidia-nccl-cu12"
        ]

    def test_a_copy_that_cannot_be_opened_is_the_reason(self):
        environment = self.environment(version=None, is_used=False, problem="invalid ELF header")
        advice = advice_of(environment.report(), "NCCL")
        assert "invalid ELF header" in advice["why"]
        assert advice["command"] == "pip install nvidia-nccl-cu12"

    def test_two_cupys(self):
        environment = self.environment()
        environment.install("CuPy", "cupy-cuda13x", "14.0.1")
        command = advice_of(environment.report(), "CuPy")["command"]
        assert command == "pip uninstall -y cupy-cuda12x cupy-cuda13x"

    def test_ranks_take_their_gpus_in_order(self):
        gpus = self.environment().report()["default_gpus"]
        assert [gpu["number"] for gpu in gpus] == list(range(8))
        assert gpus[7]["pci_address"] == "0000:df:00.0"


class TestAmd:
    def test_rccl_is_chosen_and_never_executed_is_said(self):
        row = chosen(amd())["GPU arrays"]
        assert row["backend"] == "rccl"
        assert "never been executed on an AMD GPU" in row["reason"]

    def test_the_extra_is_rocm(self):
        assert commands(amd().report()) == ["pip install 'gpucoll[rocm]'"]

    def test_without_rccl(self):
        environment = amd()
        environment["libraries"].clear()
        report = environment.report()
        assert advice_of(report, "RCCL")["command"] == "sudo apt install rccl"
        assert chosen(environment)["GPU arrays"]["backend"] == DIRECT

    def test_gpu_direct_by_peer_memory(self):
        verdicts = amd().report()["gpu_direct_rdma"]
        assert [verdict["serves"] for verdict in verdicts] == [True] * 8


class TestGpusThatCannotBeUsed:
    def test_a_container_without_the_toolkit(self):
        environment = nvidia(gpus=0)
        environment.driver("nvidia").update(interface=None, problem="libcuda.so.1: cannot open")
        assert commands(environment.report()) == ["docker run --gpus all ..."]

    def test_the_kernel_has_no_driver(self):
        environment = nvidia(gpus=0)
        environment.driver("nvidia").update(kernel_module=None, interface=None, problem="none")
        report = environment.report()
        assert commands(report) == [None]
        assert "not loaded NVIDIA's driver" in advice_of(report, "NVIDIA GPUs")["why"]

    def test_the_process_keeps_to_the_cpu(self):
        environment = nvidia(gpus=0)
        problem = "GPUCOLL_CPU_ONLY keeps this process to the CPU"
        environment.driver("nvidia").update(interface=None, problem=problem)
        assert commands(environment.report()) == ["unset GPUCOLL_CPU_ONLY"]

    def test_graphics_of_the_processor_beside_gpus_that_serve_are_not_mentioned(self):
        environment = nvidia()
        environment.add_library()
        environment.install("CuPy", "cupy-cuda12x")
        environment.driver("amd").update(kernel_module="part of the kernel")
        assert environment.report()["advice"] == []

    def test_hidden_by_a_variable(self):
        environment = nvidia(gpus=0)
        environment["gpus"]["visible_devices"] = {"CUDA_VISIBLE_DEVICES": ""}
        assert commands(environment.report()) == ["unset CUDA_VISIBLE_DEVICES"]

    def test_a_container_without_the_device_files_of_amd(self):
        environment = amd()
        environment["gpus"]["devices"].clear()
        assert commands(environment.report()) == [
            "docker run --device /dev/kfd --device /dev/dri ..."
        ]

    def test_device_files_without_a_driver_that_starts(self):
        environment = nvidia(gpus=0)
        environment.driver("nvidia").update(interface=None, problem="libcuda.so.1: cannot open")
        row = chosen(environment)["GPU arrays"]
        assert row["backend"] is None
        assert "libcuda.so.1: cannot open" in row["reason"]

    def test_only_the_vendor_that_a_communicator_takes_counts(self):
        environment = amd()
        environment["gpus"].update(kind="cuda", kind_reason="GPUCOLL_GPU_KIND says cuda")
        assert chosen(environment)["GPU arrays"]["backend"] is None

    def test_the_probe_gave_no_answer(self):
        environment = nvidia()
        environment.problems["gpus"] = "no answer within 20 s; it was ended"
        report = environment.report()
        assert report["gpus"] is None
        assert report["problems"] == [
            {"probe": "gpus", "problem": "no answer within 20 s; it was ended"}
        ]
        assert report["auto"][1]["reason"] == "the drivers did not answer"


class TestHost:
    def test_a_container_without_dev_shm_is_well_with_memfd(self):
        environment = laptop()
        environment["memory"].update(dev_shm_bytes=None, dev_shm_free_bytes=None)
        assert environment.report()["advice"] == []

    def test_without_memfd_it_has_files_on_disk(self):
        environment = laptop()
        environment["memory"].update(dev_shm_bytes=None, memfd_problem="Operation not permitted")
        report = environment.report()
        assert report["cpu_path_works"] is True
        assert commands(report) == ["docker run --shm-size=1g ..."]

    def test_without_memory_for_a_segment(self):
        environment = laptop()
        environment["memory"]["shared_memory_problem"] = "no shared memory for the segment"
        environment.found["self_test"] = None
        report = environment.report()
        assert report["cpu_path_works"] is False
        assert advice_of(report, "shared memory")

    def test_half_a_cpu(self):
        environment = laptop()
        environment["cpus"].update(quota=0.5, ranks_at_once=1)
        report = environment.report()
        assert "limited to 0.5" in advice_of(report, "CPU quota")["why"]
        assert report["cpu_path_works"] is True

    @pytest.mark.parametrize(
        ("scope", "command"),
        [
            (1, "sudo sysctl kernel.yama.ptrace_scope=0"),
            (0, "docker run --cap-add SYS_PTRACE ..."),
            (None, "docker run --cap-add SYS_PTRACE ..."),
        ],
    )
    def test_ranks_that_may_not_read_each_other(self, scope, command):
        environment = laptop()
        environment["self_test"]["single_copy"] = False
        environment["memory"]["ptrace_scope"] = scope
        assert commands(environment.report()) == [command]

    def test_the_self_test_is_the_verdict(self):
        environment = laptop()
        environment.found["self_test"] = {
            "passed": False,
            "elapsed_s": None,
            "single_copy": None,
            "problem": "DeadlineError: ranks 0, 1",
        }
        report = environment.report()
        assert report["cpu_path_works"] is False
        assert "does not work here" in report["auto"][0]["reason"]

    def test_without_the_self_test_numba_must_be_there(self):
        environment = laptop()
        environment.found["self_test"] = None
        assert environment.report()["cpu_path_works"] is True
        environment["packages"][1].update(version=None, distribution=None)
        assert environment.report()["cpu_path_works"] is False
        assert commands(environment.report()) == ["pip install numba"]


class TestRdma:
    def test_a_module_that_is_not_loaded(self):
        environment = nvidia()
        environment["topology"]["peer_memory"] = {}
        for device in environment["gpus"]["devices"]:
            device["dma_buf"] = False
        report = environment.report()
        assert [x["serves"] for x in report["gpu_direct_rdma"]] == [False] * 8
        assert commands(report).count("sudo modprobe nvidia-peermem") == 1

    def test_little_memory_may_be_locked(self):
        environment = nvidia()
        environment["memory"]["locked_bytes"] = 8 << 20
        advice = advice_of(environment.report(), "locked memory")
        assert advice["command"] == "ulimit -l unlimited"

    def test_that_does_not_matter_without_rdma(self):
        environment = laptop()
        environment["memory"]["locked_bytes"] = 8 << 20
        assert environment.report()["advice"] == []
