"""The table of thresholds: what it holds for however many ranks."""

from __future__ import annotations

import pytest

from gpucoll.backends.choice import Seen
from gpucoll.backends.cpu.host.tuning import WISH, tune
from gpucoll.transport.shared.layout import MAX_RANKS, SegmentLayout


@pytest.mark.parametrize("cpus_a_rank", [0, 1])
def test_every_number_of_ranks_has_a_table(cpus_a_rank):
    """Each threshold is one that the layout takes; 150 ranks had none."""
    for world_size in range(1, MAX_RANKS + 1):
        introductions = [
            {
                "cpus": [rank] if cpus_a_rank else [0],
                "gpu": [*Seen("", "none")],
                "same": {WISH: "auto"},
            }
            for rank in range(world_size)
        ]
        tuning = tune(introductions)
        assert tuning.rooted_bytes % 64 == 0
        assert SegmentLayout(world_size, tuning).size_bytes > 0
