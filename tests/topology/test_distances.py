"""Distances and nearest NICs on public machines, read from made sysfs trees and from XML."""

from __future__ import annotations

import pytest
from tests.topology.machines import DGX_A100, dgx_h100, mi300x, write_sysfs, write_xml

from gpucoll.topology.machine import (
    Distance,
    Gpu,
    Machine,
    Nic,
    Place,
    distance,
    gpu_label,
    nearest_nics,
)
from gpucoll.topology.nccl_xml import read_xml
from gpucoll.topology.sysfs import read_machine

MI300X_NUMA = [0, 0, 0, 0, 1, 1, 1, 1]
A100_NUMA = [3, 3, 1, 1, 7, 7, 5, 5]
H100_NIC = [0, 3, 4, 5, 6, 9, 10, 11]

MACHINES = {
    "mi300x": (mi300x(), "amd"),
    "a100": (DGX_A100, "nvidia"),
    "h100": (dgx_h100(), "nvidia"),
}


def from_sysfs(name, tmp_path):
    text, vendor = MACHINES[name]
    return read_machine(write_sysfs(tmp_path / "root", text, vendor))


def from_xml(name, tmp_path, switch_links=0):
    text, vendor = MACHINES[name]
    return read_xml(write_xml(tmp_path / "topology.xml", text, vendor, switch_links))


READERS = {"sysfs": from_sysfs, "xml": from_xml}


def matrix(machine):
    """Return the rows of GPU x NIC as words, each GPU by its bus."""
    return {
        gpu.place.address[5:7]: " ".join(
            distance(gpu.place, nic.place).name for nic in machine.nics
        )
        for gpu in machine.gpus
    }


@pytest.mark.parametrize("reader", READERS)
class TestMi300x:
    def test_each_gpu_is_two_switches_from_its_own_nic(self, reader, tmp_path):
        machine = READERS[reader]("mi300x", tmp_path)
        near = "NODE" if reader == "sysfs" else "PHB"

        expected = [
            " ".join(
                "PXB" if nic == gpu else near if nic // 4 == gpu // 4 else "SYS" for nic in range(8)
            )
            for gpu in range(8)
        ]

        assert list(matrix(machine).values()) == expected
        assert [nic.name for nic in machine.nics] == [f"mlx5_{number}" for number in range(8)]

    def test_nearest(self, reader, tmp_path):
        machine = READERS[reader]("mi300x", tmp_path)
        assert nearest_nics(machine.gpus, machine) == list(range(8))

    def test_numa_and_cpus(self, reader, tmp_path):
        machine = READERS[reader]("mi300x", tmp_path)
        assert [gpu.place.numa_node for gpu in machine.gpus] == MI300X_NUMA
        assert machine.gpus[7].place.cpus == (*range(56, 112), *range(168, 224))
        assert {gpu.vendor for gpu in machine.gpus} == {"amd"}


@pytest.mark.parametrize("reader", READERS)
class TestDgxA100:
    def test_pairs_of_gpus_share_two_nics(self, reader, tmp_path):
        rows = matrix(READERS[reader]("a100", tmp_path))
        assert rows == {
            "07": "PXB PXB SYS SYS SYS SYS SYS SYS SYS SYS",
            "0f": "PXB PXB SYS SYS SYS SYS SYS SYS SYS SYS",
            "47": "SYS SYS PXB PXB SYS SYS SYS SYS SYS SYS",
            "4e": "SYS SYS PXB PXB SYS SYS SYS SYS SYS SYS",
            "87": "SYS SYS SYS SYS PXB PXB SYS SYS SYS SYS",
            "90": "SYS SYS SYS SYS PXB PXB SYS SYS SYS SYS",
            "b7": "SYS SYS SYS SYS SYS SYS PXB PXB SYS SYS",
            "bd": "SYS SYS SYS SYS SYS SYS PXB PXB SYS SYS",
        }

    def test_the_two_nics_are_dealt_out(self, reader, tmp_path):
        machine = READERS[reader]("a100", tmp_path)
        by_bus = sorted(machine.gpus, key=lambda gpu: gpu.place.address)
        assert nearest_nics(by_bus, machine) == list(range(8))

    def test_numa(self, reader, tmp_path):
        machine = READERS[reader]("a100", tmp_path)
        by_bus = sorted(machine.gpus, key=lambda gpu: gpu.place.address)
        assert [gpu.place.numa_node for gpu in by_bus] == A100_NUMA

    def test_gpus_of_one_outer_switch(self, reader, tmp_path):
        machine = READERS[reader]("a100", tmp_path)
        first, second, third, *_ = sorted(machine.gpus, key=lambda gpu: gpu.place.address)
        assert gpu_label(first, second) == "PXB"
        assert gpu_label(second, third) == "SYS"


@pytest.mark.parametrize("reader", READERS)
class TestDgxH100:
    def test_each_gpu_has_a_nic_of_its_own(self, reader, tmp_path):
        machine = READERS[reader]("h100", tmp_path)
        near = "NODE" if reader == "sysfs" else "PHB"

        expected = [
            " ".join(
                "PXB" if nic == H100_NIC[gpu] else near if nic // 6 == gpu // 4 else "SYS"
                for nic in range(12)
            )
            for gpu in range(8)
        ]

        assert list(matrix(machine).values()) == expected
        assert nearest_nics(machine.gpus, machine) == H100_NIC

    def test_two_ports_of_a_card(self, reader, tmp_path):
        machine = READERS[reader]("h100", tmp_path)
        places = {nic.name: nic.place for nic in machine.nics}
        assert distance(places["mlx5_1"], places["mlx5_2"]) == Distance.PIX
        assert distance(places["mlx5_7"], places["mlx5_8"]) == Distance.PIX
        assert distance(places["mlx5_0"], places["mlx5_6"]) == Distance.SYS


def test_nvlink_through_switches_goes_before_pci(tmp_path):
    machine = from_xml("h100", tmp_path, switch_links=9)
    labels = {gpu_label(a, b) for a in machine.gpus for b in machine.gpus}
    assert labels == {"SELF", "NV18"}


# --- single cases -------------------------------------------------------------------------------


def place(address, *switches, bridge="pci0000:00", node=0):
    return Place(address, switches, bridge, node)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (place("0000:03:00.0", "a", "b"), Distance.SELF),
        (place("0000:03:00.1", "a", "b"), Distance.PIX),
        (place("0000:04:00.0", "a", "b"), Distance.PIX),
        (place("0000:04:00.0", "a"), Distance.PXB),
        (place("0000:04:00.0", "a", "b", "c"), Distance.PXB),
        (place("0000:04:00.0", "a", "c"), Distance.PXB),
        (place("0000:04:00.0", "c"), Distance.PHB),
        (place("0000:04:00.0"), Distance.PHB),
        (place("0000:04:00.0", bridge="pci0000:40"), Distance.NODE),
        (place("0000:04:00.0", bridge="pci0000:40", node=1), Distance.SYS),
        (place("0000:04:00.0", node=-1), Distance.PHB),
    ],
)
def test_distance_is_what_lies_between(other, expected):
    first = place("0000:03:00.0", "a", "b")
    assert distance(first, other) == expected
    assert distance(other, first) == expected


def test_a_virtual_machine_without_switches_is_one_host_bridge():
    flat = [place(f"0000:00:{slot:02x}.0") for slot in range(3, 6)]
    assert {distance(a, b) for a in flat for b in flat if a != b} == {Distance.PHB}


def nic(name, address="0000:09:00.0", **facts):
    return Nic(name, place(address), **{"is_rdma": True, **facts})


@pytest.mark.parametrize(
    ("nics", "expected"),
    [
        ([], [None, None, None]),
        ([nic("a")], [0, 0, 0]),
        ([nic("a"), nic("b")], [0, 1, 0]),
        ([nic("a"), nic("b", is_up=False)], [0, 0, 0]),
        ([nic("a", is_up=False), nic("b", is_up=False)], [0, 1, 0]),
        ([nic("a", speed_mbps=100_000), nic("b", speed_mbps=400_000)], [1, 1, 1]),
        ([nic("a", is_rdma=False, speed_mbps=400_000), nic("b", speed_mbps=1)], [1, 1, 1]),
        ([nic("a", is_rdma=False)], [0, 0, 0]),
    ],
)
def test_equal_nics_are_dealt_out_and_better_ones_go_first(nics, expected):
    gpus = tuple(Gpu(place(f"0000:0{number}:00.0"), "nvidia") for number in range(3))
    assert nearest_nics(gpus, Machine(gpus, tuple(nics), "a test")) == expected


def test_links_between_amd_gpus_are_called_xgmi():
    links = {"0000:02:00.0": 1}
    first = Gpu(place("0000:01:00.0"), "amd", links=links)
    second = Gpu(place("0000:02:00.0"), "amd")
    assert gpu_label(first, second) == gpu_label(second, first) == "XGMI"
    assert gpu_label(first, first) == "SELF"
