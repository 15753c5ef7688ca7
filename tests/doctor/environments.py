"""What the probes find on machines that CI does not have: the doctor concludes from it."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from pathlib import Path

from tests.topology.machines import DGX_H100_GPUS, dgx_h100, mi300x, write, write_sysfs

from gpucoll.doctor.examination import SECTIONS, report_of
from gpucoll.doctor.isolation import Answer
from gpucoll.doctor.network import topology
from gpucoll.topology.machine import SWITCH

WHEEL = "/venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2"

LAPTOP = {
    "cpus": {
        "model": "A Processor",
        "count": 8,
        "usable": "0-7",
        "usable_count": 8,
        "quota": None,
        "ranks_at_once": 8,
        "numa_nodes": 1,
    },
    "memory": {
        "total_bytes": 32 << 30,
        "available_bytes": 20 << 30,
        "limit_bytes": None,
        "memfd_problem": None,
        "shared_memory_problem": None,
        "dev_shm_bytes": 16 << 30,
        "dev_shm_free_bytes": 16 << 30,
        "ptrace_scope": 0,
        "open_files": 1024,
        "locked_bytes": None,
    },
    "kernels": {
        "folder": "/opt/venv/lib/python3.12/site-packages/gpucoll/machine_code",
        "compiled": True,
        "level": "x86-64-v4",
        "package_problem": None,
    },
    "packages": [
        {"name": "NumPy", "distribution": "numpy", "version": "2.3.1", "built_for": None},
        {"name": "Numba", "distribution": "numba", "version": "0.61.2", "built_for": None},
        {"name": "CuPy", "distribution": None, "version": None, "built_for": None},
        {"name": "PyTorch", "distribution": None, "version": None, "built_for": None},
        {"name": "NCCL wheel", "distribution": None, "version": None, "built_for": None},
    ],
    "gpus": {
        "kind": "",
        "kind_reason": "there are no device files of NVIDIA's, AMD's or Intel's driver",
        "may_share": False,
        "drivers": [
            {
                "vendor": vendor,
                "kernel_module": None,
                "is_open": None,
                "interface": None,
                "toolkit": None,
                "problem": "the driver cannot be loaded",
                "compiler": None,
                "compiler_problem": None,
            }
            for vendor in ("nvidia", "amd")
        ],
        "devices": [],
        "visible_devices": {},
    },
    "libraries": [],
    "mpi": None,
    "topology": {
        "source": "sysfs",
        "gpus": [],
        "nics": [],
        "gpu_to_gpu": [],
        "gpu_to_nic": [],
        "knows_nvlinks": False,
        "peer_memory": {},
        "kernel_release": "6.8.0-50-generic",
        "has_dma_buf_options": None,
    },
    "gpu_network": {
        "interface": "eth0",
        "socket_ifname": "=eth0",
        "socket_ifname_source": "gpucoll",
        "ib_hca": None,
        "ib_hca_source": None,
    },
    "self_test": {"passed": True, "elapsed_s": 0.8, "single_copy": True, "problem": None},
}
"""A machine without GPUs, on which all is well."""


class Environment:
    """A machine that begins as LAPTOP and is changed."""

    def __init__(self):
        self.found = copy.deepcopy(LAPTOP)
        self.problems = {}

    def __getitem__(self, section):
        return self.found[section]

    def report(self):
        """Return the doctor's report of it."""
        names = [*SECTIONS, *(["self_test"] if self.found["self_test"] else [])]
        answers = {
            name: Answer(None, self.problems[name])
            if name in self.problems
            else Answer(self.found[name], None)
            for name in names
        }
        return report_of(answers)

    def driver(self, vendor):
        return next(x for x in self["gpus"]["drivers"] if x["vendor"] == vendor)

    def install(self, name, distribution, version="1.0", built_for=None):
        kept = [x for x in self["packages"] if x["name"] != name or x["version"]]
        package = {"name": name, "distribution": distribution, "version": version}
        self.found["packages"] = [*kept, {**package, "built_for": built_for}]

    def add_library(self, path=WHEEL, version="2.28.9", name="NCCL", **facts):
        library = {"name": name, "path": path, "version": version, "problem": None}
        defaults = {"source": "the wheel on Python's path", "is_used": True}
        self["libraries"].append({**library, **defaults, **facts})


@functools.cache
def topology_of(machine, vendor, file):
    """Return what the probe says of a machine with one of the files that show peer memory."""
    with tempfile.TemporaryDirectory() as folder:
        root = write_sysfs(Path(folder), machine, vendor)
        write(root / "proc/sys/kernel/osrelease", "6.8.0-50-generic")
        write(root / file, "1.0")
        links = {f"0000:{gpu}:00.0": {SWITCH: 18} for gpu in DGX_H100_GPUS}
        return topology(json.dumps(links if vendor == "nvidia" else None), root)


def laptop():
    return Environment()


def nvidia(interface="12.8", gpus=8):
    """Return a DGX H100 with CUDA's driver, without NCCL or a library for arrays."""
    environment = Environment()
    found = topology_of(dgx_h100(), "nvidia", "sys/module/nvidia_peermem/version")
    environment.found["topology"] = copy.deepcopy(found)
    environment["gpus"].update(kind="cuda", kind_reason="there is /dev/nvidiactl")
    environment.driver("nvidia").update(
        kernel_module="570.86.15",
        is_open=True,
        interface=interface,
        problem=None,
        compiler="NVRTC 12.8 (/usr/local/cuda/lib64/libnvrtc.so.12)",
    )
    environment["gpus"]["devices"] += devices_of(environment, "nvidia", "NVIDIA H100 80GB HBM3")
    del environment["gpus"]["devices"][gpus:]
    return environment


def amd():
    """Return eight MI300X with ROCm and RCCL, without CuPy."""
    environment = Environment()
    found = topology_of(mi300x(), "amd", "sys/kernel/mm/memory_peers/amdkfd/version")
    environment.found["topology"] = copy.deepcopy(found)
    environment["gpus"].update(kind="rocm", kind_reason="there is /dev/kfd")
    environment.driver("amd").update(
        kernel_module="6.12.12",
        is_open=True,
        interface="7.0",
        toolkit="7.0.1",
        problem=None,
        compiler_problem="GPU kernels are compiled by hipRTC, which cannot be loaded",
    )
    environment["gpus"]["devices"] += devices_of(environment, "amd", "AMD Instinct MI300X")
    source = "the system's loader finds it"
    environment.add_library("/opt/rocm/lib/librccl.so.1", "2.26.6", "RCCL", source=source)
    return environment


def devices_of(environment, vendor, name):
    return [
        {
            "vendor": vendor,
            "number": number,
            "name": name,
            "uuid": f"GPU-00000000-0000-0000-0000-{number:012d}",
            "pci_address": place["pci_address"],
            "architecture": "sm_90" if vendor == "nvidia" else None,
            "gpu_direct_rdma": True if vendor == "nvidia" else None,
            "dma_buf": True if vendor == "nvidia" else None,
            "stream_wait_value": True,
        }
        for number, place in enumerate(environment["topology"]["gpus"])
    ]
