"""What sysfs and NCCL's XML are read as, odd and broken ones too."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.topology.machines import link, write, write_interface, write_nic, write_sysfs

from gpucoll.errors import ArgumentError
from gpucoll.topology.nccl_xml import read_xml
from gpucoll.topology.sysfs import natural_key, read_machine

ONE_GPU = """
node 0 0-7
 bridge 00
  switch 01
   gpu 03
   nic 04 mlx5_0
"""


class TestSysfs:
    def test_nothing_there(self, tmp_path):
        machine = read_machine(tmp_path)
        assert (machine.gpus, machine.nics) == ((), ())

    def test_what_is_known_of_each(self, tmp_path):
        root = write_sysfs(tmp_path, ONE_GPU)
        link(root / "sys/bus/pci/devices/0000:03:00.0/driver", root / "sys/bus/pci/drivers/nvidia")

        (gpu,), (nic,) = read_machine(root).gpus, read_machine(root).nics

        assert (gpu.place.address, gpu.vendor, gpu.driver) == ("0000:03:00.0", "nvidia", "nvidia")
        assert gpu.place.switches == nic.place.switches == ("0000:01:00.0",)
        assert gpu.place.host_bridge == "pci0000:00"
        assert (nic.name, nic.is_rdma, nic.is_up) == ("mlx5_0", True, True)
        assert (nic.speed_mbps, nic.link_layer) == (400_000, "InfiniBand")

    def test_a_port_that_is_down(self, tmp_path):
        root = write_sysfs(tmp_path, ONE_GPU)
        folder = (root / "sys/bus/pci/devices/0000:04:00.0").resolve()
        write_nic(root, folder, "mlx5_0", rate="10 Gb/sec (4X SDR)", state="1: DOWN")
        assert read_machine(root).nics[0].is_up is False

    def test_an_interface_belongs_to_its_rdma_device_or_stands_alone(self, tmp_path):
        root = write_sysfs(tmp_path, ONE_GPU + "  nic 05 gone\n")
        (root / "sys/class/infiniband/gone").unlink()
        for bus, name in (("04", "ib0"), ("05", "eth0")):
            folder = (root / f"sys/bus/pci/devices/0000:{bus}:00.0").resolve()
            write_interface(root, folder, name)

        rdma, plain = read_machine(root).nics

        assert (rdma.name, rdma.interfaces) == ("mlx5_0", ("ib0",))
        assert (plain.name, plain.is_rdma, plain.is_up, plain.speed_mbps) == (
            "eth0",
            False,
            True,
            10000,
        )

    def test_an_interface_on_a_virtio_device_sits_where_that_does(self, tmp_path):
        root = write_sysfs(tmp_path, ONE_GPU)
        folder = (root / "sys/bus/pci/devices/0000:04:00.0").resolve() / "virtio2"
        write_interface(root, folder, "eth0", speed="-1", state="unknown")
        nic = read_machine(root).nics[0]
        assert (nic.name, nic.interfaces) == ("mlx5_0", ("eth0",))

    def test_devices_without_pci_are_left_out(self, tmp_path):
        root = write_sysfs(tmp_path, ONE_GPU)
        write(root / "sys/devices/virtual/net/lo/operstate", "unknown")
        link(root / "sys/class/net/lo", root / "sys/devices/virtual/net/lo")
        assert [nic.name for nic in read_machine(root).nics] == ["mlx5_0"]

    def test_graphics_of_a_servers_console_are_no_gpu(self, tmp_path):
        root = write_sysfs(tmp_path, ONE_GPU, "amd")
        link(root / "sys/bus/pci/devices/0000:03:00.0/driver", root / "sys/bus/pci/drivers/radeon")
        assert read_machine(root).gpus == ()

    @pytest.mark.parametrize(
        ("vendor", "kind", "is_gpu"),
        [
            ("0x10de", "0x030000", True),
            ("0x10de", "0x030200", True),
            ("0x1002", "0x120000", True),
            ("0x10de", "0x040300", False),  # a graphics card's sound
            ("0x10de", "0x068000", False),  # an NVSwitch
            ("0x8086", "0x030000", False),
        ],
    )
    def test_what_is_a_gpu(self, tmp_path, vendor, kind, is_gpu):
        root = write_sysfs(tmp_path, ONE_GPU)
        folder = root / "sys/bus/pci/devices/0000:03:00.0"
        write(folder / "vendor", vendor)
        write(folder / "class", kind)
        assert len(read_machine(root).gpus) == is_gpu

    @pytest.mark.parametrize(("nodes", "expected"), [((0,), 0), ((0, 1), -1), ((), -1)])
    def test_no_numa_node_is_the_only_one_if_there_is_only_one(self, tmp_path, nodes, expected):
        root = write_sysfs(tmp_path, ONE_GPU)
        (root / "sys/devices/system/node/node0/cpulist").unlink()
        (root / "sys/devices/system/node/node0").rmdir()
        for node in nodes:
            write(root / f"sys/devices/system/node/node{node}/cpulist", "0-7")
        write(root / "sys/bus/pci/devices/0000:03:00.0/numa_node", "-1")
        assert read_machine(root).gpus[0].place.numa_node == expected

    def test_a_bridge_behind_a_device_begins_a_tree_of_its_own(self, tmp_path):
        root = write_sysfs(tmp_path, "node 0 0-7\n")
        folder = (
            root / "sys/devices/pci0000:00/0000:00:0e.0/pci10000:00/10000:00:02.0/10000:01:00.0"
        )
        for name, text in {"vendor": "0x10de", "class": "0x030200", "numa_node": "0"}.items():
            write(folder / name, text)
        link(root / "sys/bus/pci/devices/10000:01:00.0", folder)
        place = read_machine(root).gpus[0].place
        assert (place.host_bridge, place.switches) == ("pci10000:00", ())

    def test_xgmi_links_of_kfd(self, tmp_path):
        root = write_sysfs(tmp_path, ONE_GPU.replace("nic 04 mlx5_0", "gpu 0c"), "amd")
        nodes = root / "sys/class/kfd/kfd/topology/nodes"
        write(nodes / "0/properties", "simd_count 0\nlocation_id 0")
        write(nodes / "1/properties", "simd_count 304\nlocation_id 768\ndomain 0")
        write(nodes / "2/properties", "simd_count 304\nlocation_id 3072\ndomain 0")
        write(nodes / "1/io_links/0/properties", "type 2\nnode_from 1\nnode_to 0")
        write(nodes / "1/io_links/1/properties", "type 11\nnode_from 1\nnode_to 2")

        first, second = read_machine(root).gpus

        assert first.links == {"0000:0c:00.0": 1}
        assert second.links == {}


class TestXml:
    def write(self, tmp_path, text):
        path = tmp_path / "topology.xml"
        path.write_text(text)
        return path

    def test_a_file_by_hand_has_classes_only(self, tmp_path):
        text = """<system version="1"><cpu numaid="1" affinity="ff00,0000ffff">
          <pci busid="FFFF:FF:01.0" class="0x060400" link_width="16">
            <pci busid="0001:00:00.0" class="0x030200"/><pci busid="0101:00:00.0" class="0x020700"/>
          </pci></cpu></system>"""
        machine = read_xml(self.write(tmp_path, text))
        (gpu,), (nic,) = machine.gpus, machine.nics
        assert gpu.place.switches == nic.place.switches == ("ffff:ff:01.0",)
        assert gpu.place.cpus == (*range(16), *range(40, 48))
        assert (nic.name, gpu.place.numa_node) == ("0101:00:00.0", 1)

    def test_gpus_are_in_the_order_of_their_numbers(self, tmp_path):
        gpu = '<pci busid="0000:0{}:00.0" class="0x030200"><gpu dev="{}"/></pci>'
        inner = gpu.format(1, 1) + gpu.format(2, 0)
        machine = read_xml(self.write(tmp_path, f'<system><cpu numaid="0">{inner}</cpu></system>'))
        assert [gpu.place.address for gpu in machine.gpus] == ["0000:02:00.0", "0000:01:00.0"]

    @pytest.mark.parametrize(
        ("attributes", "inner", "vendor"),
        [
            ("", '<gpu dev="0" sm="80"/>', "nvidia"),
            ("", '<gpu dev="0" gcn="908"/>', "amd"),
            ("", '<gpu dev="0"><xgmi target="0000:02:00.0"/></gpu>', "amd"),
            ('vendor="0x1002"', '<gpu dev="0"/>', "amd"),
            ('vendor="0x10de"', '<gpu dev="0" gcn="0"/>', "nvidia"),
        ],
    )
    def test_whose_gpu_it_is(self, tmp_path, attributes, inner, vendor):
        pci = f'<pci busid="0000:01:00.0" class="0x030200" {attributes}>{inner}</pci>'
        text = f'<system><cpu numaid="0">{pci}</cpu></system>'
        assert read_xml(self.write(tmp_path, text)).gpus[0].vendor == vendor

    def test_a_nic_without_pci_sits_at_its_cpu(self, tmp_path):
        net = '<net name="efa" dev="0" speed="100000"/>'
        text = f'<system><cpu numaid="1"><nic>{net}</nic></cpu></system>'
        (nic,) = read_xml(self.write(tmp_path, text)).nics
        assert (nic.name, nic.place.numa_node, nic.speed_mbps) == ("efa", 1, 100000)

    def test_of_several_hosts_the_first(self, tmp_path):
        gpu = '<pci busid="0000:01:00.0" class="0x030200"/>'
        text = "".join(f'<cpu host_hash="{host}" numaid="0">{gpu}</cpu>' for host in ("0xa", "0xb"))
        assert len(read_xml(self.write(tmp_path, f"<system>{text}</system>")).gpus) == 1

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "is no XML"),
            ("<system>", "is no XML"),
            ("<graphs/>", "its root is <graphs>"),
            ('<!DOCTYPE x [<!ENTITY a "b">]><system/>', "declares entities"),
            ('<system><cpu numaid="one"/></system>', "numaid='one'"),
            ('<system><cpu affinity="xyz"/></system>', "affinity='xyz'"),
        ],
    )
    def test_broken_files_are_refused(self, tmp_path, text, message):
        with pytest.raises(ArgumentError, match=message):
            read_xml(self.write(tmp_path, text))

    def test_missing_and_endless_files_are_refused(self, tmp_path):
        with pytest.raises(ArgumentError, match="cannot be read"):
            read_xml(tmp_path / "none.xml")
        os.mkfifo(tmp_path / "fifo")
        with pytest.raises(ArgumentError, match="is no file"):
            read_xml(tmp_path / "fifo")


def test_numbers_in_names_are_numbers():
    names = ["mlx5_10", "mlx5_2", "eth0", "mlx5_bond_0"]
    assert sorted(names, key=natural_key) == ["eth0", "mlx5_2", "mlx5_10", "mlx5_bond_0"]


def test_none_of_it_is_imported_for_the_cpus():
    code = (
        "import sys, gpucoll.topology; import gpucoll.launcher.job;"
        "print([m for m in sys.modules if m.startswith('gpucoll.topology.')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    assert result.stdout == "['gpucoll.topology.cpus']\n"
