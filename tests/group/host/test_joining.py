"""What a rank gives back that has joined and leaves again, because another one has failed."""

from __future__ import annotations

import os

import pytest

from gpucoll.backends.cpu.host import tuning
from gpucoll.group.host import joining
from gpucoll.group.host.members import Members
from gpucoll.rendezvous.job import Job


def join(further):
    job = Job(0, 1, "alone", "tests")
    facts = {"gpu": ("", "", "", "")}
    return joining.join(job, tuning.tune, 5.0, facts, make_further=lambda: [further])


def test_leaving_closes_the_further_descriptors():
    further = os.memfd_create("further")

    join(further).leave()

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(further)


def test_so_does_a_failure_on_the_way(monkeypatch):
    further = os.memfd_create("further")

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(Members, "store", fail)
    with pytest.raises(MemoryError):
        join(further)

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(further)
