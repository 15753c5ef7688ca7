"""Horovod's own tests of ``horovod.torch``; what does not pass, and why: `suite/left_out.py`."""

from __future__ import annotations

import importlib.util

import pytest
from tests.integrations.horovod.suite import left_out
from tests.integrations.horovod.suite.running import run_twice

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


@pytest.mark.parametrize(
    ("file", "n_ranks", "n_passed"),
    [
        ("parallel/test_torch.py", 2, 105),
        ("parallel/test_torch.py", 4, 105),
        ("parallel/test_common.py", 2, 6),
        ("parallel/test_timeline.py", 2, 1),
        ("single/test_torch_elastic.py", 1, 2),
    ],
)
def test_own_tests(file, n_ranks, n_passed, horovod_source):
    outcomes = run_twice(horovod_source / "test" / file, n_ranks, left_out.TORCH)

    assert not outcomes.differences(left_out.TORCH), outcomes.output[-4000:]
    assert outcomes.counts()["passed"] == n_passed
