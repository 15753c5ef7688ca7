"""The report as text: 80 columns, every section, no more than what is known."""

from __future__ import annotations

import re

import pytest
from tests.doctor.environments import WHEEL, amd, laptop, nvidia

from gpucoll.doctor.examination import SECTIONS as SECTION_NAMES
from gpucoll.doctor.text import WIDTH, render

SECTIONS = ["CPU path", "GPUs", "Libraries", "Python packages", "Network and topology"]


def everything():
    """Return a machine on which as much as possible is to be said."""
    environment = nvidia()
    environment.add_library()
    environment.add_library("/usr/lib/x86_64-linux-gnu/libnccl.so.2", "2.18.5", is_used=False)
    environment.add_library("/opt/mpich/lib/libmpi.so.12", "MPICH Version: 4.3.2", "MPI")
    environment.install("CuPy", "cupy-cuda12x", "14.0.1")
    environment["gpus"]["visible_devices"] = {"CUDA_VISIBLE_DEVICES": "0,1"}
    environment["cpus"].update(quota=0.5, ranks_at_once=1, numa_nodes=2)
    environment["memory"].update(limit_bytes=1 << 30, memfd_problem="Function not implemented")
    environment["memory"].update(dev_shm_bytes=64 << 20, dev_shm_free_bytes=1 << 20)
    environment["self_test"]["single_copy"] = False
    environment["topology"]["source"] = "/etc/topology.xml"
    environment["topology"]["nics"][3]["is_up"] = False
    environment.problems["kernels"] = "PermissionError: [Errno 13] Permission denied: '/cache'"
    return environment


@pytest.mark.parametrize("make", [nvidia, amd, everything])
def test_it_fits_80_columns(make):
    text = render(make().report())
    # What is to be copied stays whole: paths and commands.
    long = [x for x in text.splitlines() if len(x) > WIDTH and not re.search(r"/\S{40}|\$ ", x)]
    assert long == []
    assert not re.search(r"[ \t]$", text, re.MULTILINE)


def test_the_sections_are_in_order():
    text = render(everything().report())
    titles = [*SECTIONS, 'What backend="auto" takes', "Probes that failed", "What to do"]
    places = [text.index(f"\n{title}\n") for title in titles]
    assert places == sorted(places)
    assert text.endswith("The CPU path works.\n")


def test_a_section_without_findings_is_left_out():
    assert "Probes that failed" not in render(laptop().report())
    assert "What to do" not in render(laptop().report())


@pytest.mark.parametrize("section", SECTION_NAMES)
def test_a_probe_that_failed_is_a_line_and_the_rest_is_told(section):
    environment = everything()
    environment.problems = {section: "no answer within 20 s; it was ended"}
    report = environment.report()
    assert report[section] is None
    assert f"FAIL {section:<15} no answer within 20 s; it was ended" in render(report)


def test_when_all_probes_failed():
    environment = laptop()
    environment.problems = dict.fromkeys(SECTION_NAMES, "killed by SIGKILL")
    environment.found["self_test"] = None
    report = environment.report()
    assert render(report).count("killed by SIGKILL") == len(SECTION_NAMES)
    assert report["cpu_path_works"] is False


def test_a_machine_without_gpus_is_told_briefly():
    text = render(laptop().report())
    assert "none, and no NVIDIA GPU on the PCI bus" in text
    assert len(text.splitlines()) < 40


def test_the_matrix_names_every_nic_once_and_marks_each_gpus_own():
    text = render(nvidia().report())
    headers = [line.split() for line in text.splitlines() if line.startswith("       ")]
    names = [word for words in headers for word in words if word.startswith("mlx5_")]
    assert names == [f"mlx5_{number}" for number in range(12)]
    assert text.count("PXB*") == 8
    assert "0: 0-55,112-167" in text


def test_the_matrix_shows_the_gpus_that_the_process_has_by_its_own_numbers():
    environment = nvidia()
    devices = environment["gpus"]["devices"]
    devices[:] = [{**devices[6], "number": 0}, {**devices[2], "number": 1}]
    text = render(environment.report())
    rows = [line.split() for line in text.splitlines() if line.startswith("  GPU")]
    assert [row[:3] for row in rows[:2]] == [["GPU0", "X", "NV18"], ["GPU1", "NV18", "X"]]
    assert {row[0] for row in rows} == {"GPU0", "GPU1"}
    assert "6 GPUs of this machine that this process may not use" in text


def test_libraries_say_which_and_why():
    text = render(everything().report())
    assert f"{WHEEL}; used: the wheel" in " ".join(text.split())
    assert "libnccl.so.2; not used" in " ".join(text.split())


def test_amd_is_said_to_be_untried():
    assert "has never been executed on an AMD GPU" in render(amd().report())


def test_colours_only_when_asked_for():
    report = everything().report()
    plain, coloured = render(report), render(report, in_colour=True)
    assert "\033" not in plain
    assert re.sub(r"\033\[[\d;]*m", "", coloured) == plain


def test_verdicts():
    environment = laptop()
    environment.found["self_test"] = None
    assert render(environment.report()).endswith("it was not tried.\n")
    environment["memory"]["shared_memory_problem"] = "no shared memory"
    assert render(environment.report()).endswith("The CPU path does not work.\n")


def test_what_the_user_says_of_the_gpus_network():
    environment = nvidia()
    environment["gpu_network"].update(
        socket_ifname="ib0",
        socket_ifname_source="/etc/nccl.conf",
        ib_hca="mlx5_3",
        ib_hca_source="the environment",
    )
    text = " ".join(render(environment.report()).split())
    assert (
        "NCCL_SOCKET_IFNAME=ib0 from /etc/nccl.conf is kept; the hosts are linked by eth0" in text
    )
    assert "NCCL_IB_HCA=mlx5_3 from the environment is kept" in text
    environment["gpu_network"].update(interface=None, socket_ifname=None, ib_hca=None)
    text = " ".join(render(environment.report()).split())
    assert "the library chooses its interface; the hosts are linked by no interface" in text
