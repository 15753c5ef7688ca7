"""Horovod's own tests of ``horovod.torch``; what does not pass, and why: `suite/left_out.py`."""

from __future__ import annotations

import importlib.util

import pytest
from tests.integrations.horovod.suite import left_out
from tests.integrations.horovod.suite.running import run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_test_torch(n_ranks, horovod_source):
    outcomes = run(horovod_source / "test" / "parallel" / "test_torch.py", n_ranks)

    assert not outcomes.differences(left_out.TORCH), outcomes.output[-4000:]
    assert outcomes.counts()["passed"] >= 105
