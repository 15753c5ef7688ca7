"""What a driver makes of the ends of its ranks."""

from __future__ import annotations

import pickle
import re

import pytest

import gpucoll
from gpucoll.integrations.engine.collection import Collection
from gpucoll.integrations.engine.outcome import failed, lost, returned, without_result


def collection(world_size=3, *, elastic=False, timeout_s=None, grace_s=30.0):
    return Collection(world_size, elastic, timeout_s, grace_s)


def raised(rank, error):
    try:
        raise error
    except BaseException as caught:
        return failed(rank, caught)


def test_results_are_by_rank():
    made = collection()
    for rank in (2, 0, 1):
        assert made.left_s is None
        made.add(returned(rank, rank * 10))

    assert made.left_s == 0
    assert made.results("") == [0, 10, 20]


def test_the_first_failure_is_raised_with_rank_and_place():
    made = collection()
    made.add(raised(1, ValueError("first")))
    made.add(raised(0, KeyError("second")))
    made.add(returned(2, None))

    with pytest.raises(ValueError, match="first") as caught:
        made.results("")
    cause = caught.value.__cause__
    assert isinstance(cause, gpucoll.LaunchError)
    assert re.match(r"rank 1 of 3 \(host .*, process \d+\) raised ValueError", str(cause))
    assert "raise error\nValueError: first" in str(cause)


def test_a_ranks_own_failure_goes_before_those_that_follow():
    made = collection()
    made.add(raised(0, gpucoll.PeerLostError("lost rank 2")))
    made.add(raised(1, gpucoll.AbortedError("given up")))
    made.add(lost(2, "host a, process 5", "was lost with its worker"))

    with pytest.raises(gpucoll.LaunchError, match=r"rank 2 of 3 \(host a, process 5\) was lost"):
        made.results("")


def test_others_have_the_grace_time_only():
    made = collection(grace_s=0)
    made.add(raised(0, ValueError("first")))

    assert made.left_s == 0
    assert made.missing == [1, 2]
    with pytest.raises(ValueError, match="first") as caught:
        made.results("were ended")
    assert str(caught.value.__cause__).endswith("ranks 1, 2 were ended")


def test_time_is_over():
    made = collection(timeout_s=0)
    made.add(returned(1, None))

    assert made.left_s == 0
    with pytest.raises(gpucoll.DeadlineError, match="ranks 0, 2 of 3 had not ended after 0 s: so"):
        made.results("so")


def test_lost_ranks_of_an_elastic_run_are_no_failure():
    made = collection(elastic=True, grace_s=0)
    made.add(lost(1, "host a, process 5", "was lost with its worker"))
    made.add(raised(2, gpucoll.ShrinkError("the others have gone on")))
    assert made.left_s is None
    made.add(returned(0, "on"))

    first, second, third = made.results("")
    assert first == "on"
    assert isinstance(second, gpucoll.LaunchError)
    assert "rank 2 of 3" in str(third)


def test_an_elastic_run_that_nobody_survives():
    made = collection(2, elastic=True)
    made.add(lost(1, "host a, process 5", "was lost"))
    made.add(lost(0, "host a, process 6", "was lost"))

    with pytest.raises(gpucoll.LaunchError, match=r"rank 1 of 2 \(host a, process 5\) was lost"):
        made.results("")


def test_another_failure_of_an_elastic_run_is_one():
    made = collection(2, elastic=True, grace_s=0)
    made.add(lost(1, "host a, process 5", "was lost"))
    assert made.left_s is None
    made.add(raised(0, ValueError("mine")))

    with pytest.raises(ValueError, match="mine"):
        made.results("")


class UnpicklableError(Exception):
    def __reduce__(self):
        raise TypeError


class TwoArgumentsError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


@pytest.mark.parametrize(
    "error",
    [SystemExit(3), KeyboardInterrupt(), UnpicklableError("x"), TwoArgumentsError(1, 2)],
    ids=repr,
)
def test_what_cannot_be_raised_again_is_told(error):
    made = collection(1)
    made.add(pickle.loads(pickle.dumps(raised(0, error))))

    with pytest.raises(gpucoll.LaunchError, match=f"rank 0 of 1 .* raised {type(error).__name__}"):
        made.results("")


def test_a_result_that_cannot_be_had():
    made = collection(1, elastic=True)
    made.add(without_result(0, "host a, process 5", "returned a lock"))

    with pytest.raises(gpucoll.LaunchError, match=r"\(host a, process 5\) returned a lock"):
        made.results("")
