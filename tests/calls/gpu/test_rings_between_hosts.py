"""Reductions of GPU arrays between played hosts: inside by shared memory, between around rings."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from tests import oracle
from tests.calls.gpu.cases import run_cases
from tests.calls.gpu.conftest import with_communicator
from tests.calls.gpu.test_deterministic import guarded, inputs_of
from tests.calls.gpu.test_direct import cases_of
from tests.calls.gpu.test_direct_ring import noting
from tests.collective_cases import REDUCTIONS
from tests.dtypes import assert_same

from gpucoll.backends.direct import between, ring, wires

SHAPES = ["ab", "aab", "abab", "abc", "aabb", "abbcc"]


@contextlib.contextmanager
def small_arrays_go_around():
    """Small arrays go around rings, in several laps and pieces; yields which calls the hosts make."""
    made: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(between, "STAGED_BYTES", 0)
        patch.setattr(between, "SCRATCH_BYTES", 4096)
        patch.setattr(ring, "LEAST_CHUNK_BYTES", 64)
        patch.setattr(wires, "HALF_BYTES", 1024)
        for collective, maker in between._MAKERS.items():
            noted = noting(maker, collective.spelled, made)
            patch.setitem(between._MAKERS, collective, noted)
        yield made


def cases(rank, drawn, options):
    with small_arrays_go_around() as made:
        options = {**options, "device": rank.rank}
        return with_communicator(rank, options, run_cases, (drawn,)), set(made)


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("placed", SHAPES)
@pytest.mark.parametrize("schedule", ["shares", "ring"])
def test_drawn_cases(gpus_on_hosts, placed, schedule):
    drawn = [case for name in REDUCTIONS for case in cases_of(name, len(placed))]
    # The sign of a complex product's zeros depends on the order.
    drawn = [case for case in drawn if not (case.op == "prod" and case.dtype.startswith("complex"))]
    options = {"backend": "direct", "direct_schedule": schedule}
    for count, made in gpus_on_hosts.call_ranks(placed, cases, drawn, options):
        assert count == len(drawn)
        assert made >= {"all_reduce", "reduce", "reduce_scatter"}
