"""Functions that the driver of a test calls in its ranks.

Their dependencies are imported in the ranks, so that pytest's own process does not load Numba.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpucoll.testing.assignment import Assignment, Outcome
    from gpucoll.testing.rank import RankLoop
    from gpucoll.testing.session_setup import SessionSetup


def start(loop: RankLoop, setup: SessionSetup) -> None:
    """Run a pytest session until the driver closes the connection."""
    from gpucoll.testing import session

    session.start(loop, setup)


def collect(loop: RankLoop, assignment: Assignment) -> None:
    """Import the test's file and find the test."""
    loop.session.collect(assignment)


def run(loop: RankLoop, assignment: Assignment) -> Outcome:
    """Run a collected test: setup, call and teardown."""
    outcome: Outcome = loop.session.run(assignment)
    return outcome
