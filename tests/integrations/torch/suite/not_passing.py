"""What of PyTorch 2.13's tests does not pass on the backend "gpucoll", and why."""

from __future__ import annotations

from collections.abc import Iterable

from tests.integrations.torch.suite.running import Outcome

VERSION = "2.13."

GLOO_BY_NAME = "torch.distributed.monitored_barrier refuses every backend that is not called gloo"
UNMADE = "it calls a method of the group that torch calls for gloo alone; there is none here"

NOT_PASSING = {
    "test_monitored_barrier_gloo": GLOO_BY_NAME,
    "test_monitored_barrier_gloo_subgroup": GLOO_BY_NAME,
    "test_monitored_barrier_gloo_rank_0_timeout": UNMADE,
}
WITH_SMALL_GROUPS = {
    "test_monitored_barrier_failure_order": GLOO_BY_NAME,
    "test_monitored_barrier_wait_all_ranks": GLOO_BY_NAME,
}
"""These need three ranks."""

PASSED = {2: 97, 4: 122}
"""How many pass at so many ranks, where there is no GPU; one that is left out is noticed, too."""


def listed(world_size: int) -> dict[str, str]:
    """Return what does not pass at so many ranks, and why."""
    return NOT_PASSING | (WITH_SMALL_GROUPS if world_size > 2 else {})


def differences(world_size: int, outcomes: Iterable[Outcome]) -> list[str]:
    """Return a line for everything that is not as listed."""
    known = listed(world_size)
    went = {each.test: each for each in outcomes}
    failed = [each for each in went.values() if each.outcome == "failed"]
    lines = [f"{each.test} failed: {each.reason}" for each in failed if each.test not in known]
    for test, reason in known.items():
        now = went[test].outcome if test in went else "not there"
        if now != "failed":
            lines.append(f"{test} is listed as failing ({reason}), and is {now}")
    n_passed = sum(each.outcome == "passed" for each in went.values())
    if n_passed < PASSED.get(world_size, 0):
        lines.append(f"{n_passed} tests passed on {world_size} ranks, not {PASSED[world_size]}")
    return lines
