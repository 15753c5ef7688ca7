"""`gpucoll why` on jobs that seeds draw: hangs, in which it names the right rank, and healthy ones.

`tools/trial_observe.py` plays more of them.
"""

from __future__ import annotations

import pytest
from tests.observe.jobs import HANGS, HEALTHY, false_alarm, first_alarm, hanging, healthy

SEEDS = range(3)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", HANGS)
def test_the_right_rank_is_named(rank_server, tmp_path, kind, seed):
    trial = hanging(kind, seed, 3 + 2 * seed)
    with rank_server.fork(trial.n_ranks) as pool:
        alarm = first_alarm(pool, trial, tmp_path / "marks", 0.5)
        pool.kill()
    assert alarm is not None
    assert trial.is_right(alarm[0]), (alarm[0], trial.verdicts, trial.sides)


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", HEALTHY)
def test_no_alarm_on_healthy_jobs(rank_server, tmp_path, kind, seed):
    trial = healthy(kind, seed, 3 + 2 * seed)
    with rank_server.fork(trial.n_ranks) as pool:
        assert false_alarm(pool, trial, tmp_path / "marks") is None
