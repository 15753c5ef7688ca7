"""Process groups for the tests of the torch.distributed backend."""

from __future__ import annotations

import pytest
from tests.process_groups import ProcessGroups


@pytest.fixture
def groups(ranks, tmp_path):
    """Call a function of the test on ranks inside a process group: ``groups.call(2, function)``."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    return ProcessGroups(ranks, tmp_path)
