"""Horovod's own tests of elastic training; what does not pass, and why: `suite/left_out.py`."""

from __future__ import annotations

import importlib.util

import pytest
from tests.integrations.horovod.suite.running import run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


def test_test_torch_elastic(horovod_source):
    """On one rank, as Horovod runs it: its numbers of samples are those of one."""
    outcomes = run(horovod_source / "test" / "single" / "test_torch_elastic.py", 1)

    assert not outcomes.differences({}), outcomes.output[-4000:]
    assert outcomes.counts()["passed"] == 2
