"""What the watch over a growth's meeting says, and when."""

from __future__ import annotations

from unittest import mock

from gpucoll.group.growth import GrowthWatch


def test_a_newcomer_that_is_gone_is_told_once_all_old_ranks_have_come():
    """Rank 0 would end the meeting before they come, and they would wait for it in vain."""
    group = mock.MagicMock(rank=0, world_size=3)
    group.gone_ranks.return_value = set()
    watch = GrowthWatch(group)
    watch.gone_newcomers = lambda: [3]
    watch.call_newcomers = call = mock.Mock()

    assert watch.check({1, 3}) is None
    assert watch.check(()) is None
    assert not call.called
    assert watch.check({3}) == (3, "it is gone")
    assert watch.check({4}) == (3, "it is gone")
    assert call.call_count == 1
