"""What fails at any moment on one of several hosts ends calls on GPU arrays on all of them.

The functions that ranks run are those of the tests on one host.
"""

from __future__ import annotations

import pytest
from tests.calls.gpu import test_connecting as connecting
from tests.calls.gpu import test_giving_up as giving_up
from tests.calls.gpu import test_random_faults as random_faults
from tests.faults.test_ends import errors
from tests.ranks import Ended, Reply
from tests.waiting import SOON_S

from gpucoll.errors import AbortedError, DeadlineError, MismatchError, PeerLostError


@pytest.mark.soak
@pytest.mark.parametrize("placed", ["ab", "aab", "abc"])
def test_an_error_at_a_random_call_of_a_random_rank(gpus_on_hosts, placed):
    answers = gpus_on_hosts.call_ranks(placed, random_faults.fail_somewhere, range(20))

    rounds = list(zip(*(ended for ended, _ in answers), strict=True))
    for seed, kinds in enumerate(rounds):
        assert "DeadlineError" not in kinds, f"seed {seed}: {kinds}"
    assert any(any(kinds) for kinds in rounds), "nothing failed"
    assert max(longest_s for _, longest_s in answers) < SOON_S


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", ["aba", "abc"])
def test_an_asynchronous_error_at_a_random_moment(gpus_on_hosts, placed):
    answers = gpus_on_hosts.call_ranks(placed, random_faults.fail_beside, range(8))

    for seed, kinds in enumerate(zip(*(ended for ended, _ in answers), strict=True)):
        assert all(kinds), f"seed {seed}: {kinds}"
        assert "DeadlineError" not in kinds, f"seed {seed}: {kinds}"
    assert max(longest_s for _, longest_s in answers) < SOON_S


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("placed", ["abb", "abc"])
def test_a_rank_that_dies_at_a_random_moment(rank_server, gpus_on_hosts, placed, seed):
    with rank_server.fork(3) as pool:
        gpus_on_hosts.start(pool, placed, random_faults.die_somewhere, seed)
        answers = pool.collect()

    dead = [answer for answer in answers if isinstance(answer, Ended)]
    survivors = [answer for answer in answers if isinstance(answer, Reply)]
    assert (len(dead), len(survivors)) == (1, 2), answers
    for answer in survivors:
        assert answer.error is None, answer.trace
        kind, took_s = answer.result
        assert kind == "PeerLostError", kind
        assert took_s < SOON_S


# --- connecting -----------------------------------------------------------------------------------


def test_a_first_call_that_waits_for_the_other_ranks(gpus_on_hosts):
    found = gpus_on_hosts.call_ranks("aba", giving_up.connect_at_the_first_call)

    assert found == [[[3.0] * 8] * 3] * 3


def test_a_rank_that_is_lost_while_the_library_connects_it(rank_server, gpus_on_hosts):
    with rank_server.fork(2) as pool:
        gpus_on_hosts.start(pool, "ab", giving_up.leave_before_the_first_call)
        reply, left = pool.collect()

    assert isinstance(left, Ended)
    assert isinstance(reply.error, PeerLostError), reply


@pytest.mark.parametrize("placed", ["ab", "abc"])
@pytest.mark.parametrize("on_rank", [0, 1])
def test_one_rank_fails_to_join(gpus_on_hosts, placed, on_rank):
    found = gpus_on_hosts.call_ranks(placed, connecting.fail_while_joining, on_rank)
    for text, shown, total in found:
        for said in (text, shown):
            assert f"NCCL cannot connect these ranks: rank {on_rank}: ncclCommInitRank" in said
        assert total == len(placed)


def test_host_arrays_on_one_host_and_gpu_arrays_on_another(gpus_on_hosts):
    for error in errors(gpus_on_hosts.replies("ab", connecting.mix_host_and_gpu)):
        assert isinstance(error, MismatchError), error


# --- waiting --------------------------------------------------------------------------------------


def test_what_is_in_progress_is_polled(gpus_on_hosts):
    expected = ([[3.0] * 8] * 3, [[3.0] * 8, [1.0] * 8])
    assert gpus_on_hosts.call_ranks("abb", giving_up.go_on_in_progress) == [expected] * 3


def test_what_stays_in_progress_is_a_deadline(gpus_on_hosts):
    for error in errors(gpus_on_hosts.replies("ab", giving_up.stay_in_progress)):
        assert isinstance(error, DeadlineError | AbortedError), error


def test_ctrl_c_in_a_wait(gpus_on_hosts):
    assert gpus_on_hosts.call_ranks("ab", giving_up.interrupt)[0] < SOON_S
