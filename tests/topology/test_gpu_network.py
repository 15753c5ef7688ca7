"""Interface and NIC of the vendor's library: what the user says, and what is nearest to a GPU."""

from __future__ import annotations

import pytest
from tests.topology.machines import dgx_h100, mi300x, write, write_sysfs, write_xml

from gpucoll.topology.gpu_network import described_nic, exactly, machine_of, setting_of

NAME = "NCCL_SOCKET_IFNAME"


def test_one_interface_and_no_other_that_begins_so():
    assert exactly("eth1") == "=eth1"


@pytest.mark.parametrize("value", ["ib0", "^docker,lo", ""])
def test_the_environment_goes_first(tmp_path, value):
    write(tmp_path / "etc/nccl.conf", f"{NAME}=eth7")
    assert setting_of(NAME, {NAME: value}, tmp_path) == (value, "the environment")


def test_files_of_the_library(tmp_path):
    root, home, own = tmp_path / "root", tmp_path / "home", tmp_path / "own.conf"
    assert setting_of(NAME, {"HOME": str(home)}, root) is None

    write(root / "etc/nccl.conf", "# the host's\nNCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME = bond0\n")
    assert setting_of(NAME, {"HOME": str(home)}, root) == ("bond0", "/etc/nccl.conf")
    assert setting_of("NCCL_IB_HCA", {"HOME": str(home)}, root) is None

    write(home / ".nccl.conf", "NCCL_SOCKET_IFNAME=ib1")
    assert setting_of(NAME, {"HOME": str(home)}, root) == ("ib1", f"{home}/.nccl.conf")

    write(own, "NCCL_SOCKET_IFNAME==eth9")
    found = setting_of(NAME, {"HOME": str(home), "NCCL_CONF_FILE": str(own)}, root)
    assert found == ("=eth9", str(own))


def test_the_nearest_nic_of_each_gpu(tmp_path):
    machine = machine_of({}, write_sysfs(tmp_path, dgx_h100(), "nvidia"))
    found = [described_nic(machine, gpu.place.address) for gpu in machine.gpus]

    assert found[0] == ("mlx5_0", "mlx5_0 (InfiniBand, 400 Gbit/s), PXB from the GPU: the nearest")
    assert len({name for name, _ in found}) == 8


def test_a_topology_file_goes_before_sysfs(tmp_path):
    file = write_xml(tmp_path / "topology.xml", mi300x(), "amd", 0)
    machine = machine_of({"NCCL_TOPO_FILE": str(file)}, tmp_path)

    assert described_nic(machine, machine.gpus[3].place.address)[0] == machine.nics[3].name


def test_no_such_gpu_and_no_nic(tmp_path):
    machine = machine_of({}, write_sysfs(tmp_path, "node 0 0-3\n  bridge 00\n    gpu 01\n"))

    name, text = described_nic(machine, "0000:01:00.0")
    assert (name, text[:15]) == ("", "no RDMA device:")
    assert described_nic(machine, "0000:99:00.0") == (
        "",
        "not known: sysfs shows no GPU at 0000:99:00.0",
    )
