"""The choice between shares and a ring, by what connects the GPUs."""

from __future__ import annotations

import pytest
from tests.topology.machines import write_sysfs

from gpucoll.backends.direct import schedule
from gpucoll.backends.direct.schedule import Schedule, decide
from gpucoll.topology.machine import SWITCH

ADDRESSES = ["0000:1b:00.0", "0000:1c:00.0", "0000:8b:00.0", "0000:8c:00.0"]
TWO_NODES = """
node 0 0-7
 bridge 10
  switch 11
   gpu 1b
   gpu 1c
node 1 8-15
 bridge 80
  switch 81
   gpu 8b
   gpu 8c
"""


@pytest.fixture
def decided(tmp_path, monkeypatch):
    """Return what decides for a machine with two GPUs on each of two nodes."""
    root = write_sysfs(tmp_path, TWO_NODES)

    def call(links, addresses=ADDRESSES, wish="auto", uuids=None, kind="cuda"):
        monkeypatch.setattr(schedule, "nvlinks", lambda: links)
        return decide(kind, wish, list(zip(addresses, uuids or addresses, strict=True)), root)

    return call


def test_gpus_on_a_bus(decided):
    assert decided({}) == (True, "the GPUs of ranks 0 and 1 share a bus (PIX)")
    assert decided({}, ADDRESSES[1:]) == (True, "the GPUs of ranks 0 and 1 share a bus (SYS)")
    assert decided(None, kind="rocm") == (True, "the GPUs of ranks 0 and 1 share a bus (PIX)")


def test_gpus_in_linked_pairs_share_a_bus(decided):
    others = [*ADDRESSES[1::-1], *ADDRESSES[:1:-1]]
    links = {gpu: {other: 4} for gpu, other in zip(ADDRESSES, others, strict=True)}
    assert decided(links) == (True, "the GPUs of ranks 0 and 2 share a bus (SYS)")


def test_all_gpus_are_linked(decided):
    links = {gpu: {SWITCH: 18} for gpu in ADDRESSES}
    assert decided(links) == (False, "all GPUs are linked (NV18)")


@pytest.mark.parametrize(
    ("links", "given", "why"),
    [
        ({}, {"addresses": ADDRESSES[:2]}, "a ring pays with 3 GPUs and more"),
        ({}, {"uuids": ["a", "b", "b", "c"]}, "some ranks share a GPU"),
        ({}, {"addresses": [*ADDRESSES[:3], "0000:99:00.0"]}, "sysfs lacks 0000:99:00.0"),
        (None, {}, "NVML does not report NVLinks"),
    ],
)
def test_shares(decided, links, given, why):
    is_ring, said = decided(links, **given)
    assert not is_ring
    assert why in said


@pytest.mark.parametrize(("wish", "is_ring"), [("ring", True), ("shares", False)])
def test_asked_for(decided, wish, is_ring):
    assert decided({}, wish=wish, uuids=["a"] * 4) == (is_ring, "asked for")
    assert decided({}, ADDRESSES[:1], wish=wish) == (False, "asked for")


def test_a_topology_that_cannot_be_read(decided, monkeypatch):
    monkeypatch.setenv("NCCL_TOPO_FILE", "/nonexistent.xml")
    is_ring, said = decided({})
    assert not is_ring
    assert "not known how GPUs are connected: topology file /nonexistent.xml" in said


def test_as_text():
    assert str(Schedule(True, (0, 2, 1), "asked for")) == "ring of ranks 0, 2, 1: asked for"
    assert str(Schedule(False, (0, 2, 1), "one bus")) == "shares: one bus"
