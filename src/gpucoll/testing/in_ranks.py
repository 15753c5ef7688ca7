"""What the driver of a test calls in its ranks, and only names itself.

What these functions stand on is imported there, so that pytest's own process loads no Numba.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpucoll.testing.assignment import Assignment, Outcome
    from gpucoll.testing.rank import RankLoop
    from gpucoll.testing.session_setup import SessionSetup


def start(loop: RankLoop, setup: SessionSetup) -> None:
    """Be a pytest session until the driver hangs up."""
    from gpucoll.testing import session

    session.start(loop, setup)


def collect(loop: RankLoop, assignment: Assignment) -> None:
    """Import the test's file and find the test in it."""
    loop.session.collect(assignment)


def run(loop: RankLoop, assignment: Assignment) -> Outcome:
    """Run a test that was collected: setup, call and teardown."""
    outcome: Outcome = loop.session.run(assignment)
    return outcome
