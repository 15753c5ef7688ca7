"""DiLoCo goes on when ranks are lost, in the same bits on all that are left; and with new ones."""

from __future__ import annotations

import os
import select
import signal
import threading
from unittest import mock

import numpy as np
import pytest
from tests.growing import begin, where
from tests.shrinking import die, results
from tests.waiting import until

import gpucoll
from gpucoll import Compression, GpucollError, PeerLostError, ShrinkError, StateError
from gpucoll.training import DiLoCo
from gpucoll.training.exchange import Transfer

SIZE, EVERY, OUTER_STEPS = 30, 4, 8


def start_of(rank):
    return np.random.default_rng(rank).normal(size=SIZE).astype(np.float32)


def inner(rank, step):
    """Return what a rank's inner optimizer adds in a step."""
    return np.random.default_rng((rank, step)).normal(size=SIZE).astype(np.float32)


def train(diloco, name, until_step=OUTER_STEPS, confirms=True):
    """Train up to an outer step; yield the numbers of outer and local step before each.

    A rank makes as many inner steps as without a loss.
    """
    periods = len(diloco.state_dict()["values"])
    first = diloco.outer_steps * EVERY // periods
    for step in range(first, until_step * EVERY // periods):
        yield divmod(step, EVERY // periods)
        own = inner(name, step)
        begin = 0
        for array in diloco.parameters:
            array += own[begin : begin + len(array)]
            begin += len(array)
        diloco.step()
    if confirms:
        diloco.confirm()


def simulated(ranks, lost, delay=0, mix=0.0, lr=0.7, momentum=0.9):
    """Return the outer values; `lost` has the step of a rank's death: it gives nothing in it."""
    f32 = np.float32
    common, velocity = start_of(0), np.zeros(SIZE, f32)
    models = {rank: common.copy() for rank in range(ranks)}
    for outer_step in range(OUTER_STEPS):
        given = {}
        for rank in [*models]:
            for local_step in range(EVERY):
                models[rank] += inner(rank, outer_step * EVERY + local_step)
                if local_step == EVERY - 1 - delay:
                    given[rank] = common - models[rank]
            if lost.get(rank) == outer_step:
                del models[rank], given[rank]
        first, *rest = given.values()
        mean = sum(rest, first) / f32(len(given))
        velocity = f32(momentum) * velocity + mean
        common = common - f32(lr) * (mean + f32(momentum) * velocity)
        for rank, own in models.items():
            models[rank] = (own - common) * f32(mix) + common
    return common


def result_of(diloco):
    values = np.concatenate(diloco.state_dict()["values"])
    return diloco.comm.world_size, values, diloco.outer_steps


def killed(comm, deadly, given, folder):
    """Train; a rank ends itself before the inner step after which it would give something.

    It waits until the others have what it gave before: between hosts, they may not have received it
    yet when the rank itself has all results, and would then go on without it.
    """
    name, model = comm.rank, [start_of(comm.rank)]
    last = EVERY - 1 - given.get("delay", 0)
    noted = [folder / str(rank) for rank in range(comm.world_size)]
    noted[name].touch()
    comm.barrier()

    def others_have_it():
        alive = [rank for rank in range(len(noted)) if deadly.get(rank, OUTER_STEPS) >= place[0]]
        return all(noted[rank].stat().st_size >= diloco.outer_steps for rank in alive)

    with DiLoCo(comm, model, every=EVERY, **given) as diloco:
        for place in train(diloco, name):
            noted[name].write_bytes(bytes(diloco.outer_steps))  # its size is read: never half of it
            if place == (deadly.get(name), last):
                until(others_have_it)
                die()
        return result_of(diloco)


def check(replies, deadly, expected, within=0.0):
    found = results(replies, but=deadly)
    for world_size, values, steps in found:
        assert (world_size, steps) == (len(found), OUTER_STEPS)
        assert values.tobytes() == found[0][1].tobytes()
        np.testing.assert_allclose(values, expected, rtol=0, atol=within)


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize(
    ("deadly", "given"),
    [
        ({}, {}),
        ({2: 3}, {}),
        ({0: 1, 3: 5}, {"delay": 1, "mix": 0.5}),
        ({1: 0}, {"delay": 3}),
        ({3: 4}, {"mix": 0.25}),
        ({0: 7}, {}),
    ],
    ids=str,
)
def test_a_rank_that_is_killed_before_an_outer_step(rank_server, deadly, given, tmp_path):
    with rank_server.fork(4) as pool:
        pool.start(killed, deadly, given, tmp_path)
        replies = pool.collect()

    check(replies, deadly, simulated(4, deadly, **given))


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", ["abcd", "aabb"])
@pytest.mark.parametrize("given", [{}, {"delay": 1}], ids=str)
def test_a_rank_that_is_killed_between_hosts(hosts, rank_server, placed, given, tmp_path):
    with rank_server.fork(4) as pool:
        hosts.start(pool, placed, killed, {2: 3}, given, tmp_path)
        replies = pool.collect()

    # Between hosts a sum may have another order: 8 sums of 4 numbers, as below.
    check(replies, [2], simulated(4, {2: 3}, **given), within=32 * 10 * 2.0**-19)


def killed_behind_a_step(comm, at_step, given):
    """Rank 3 ends after an outer step that ranks 0 and 2 complete, and rank 1 does not."""
    name, doomed = comm.rank, os.pidfd_open(comm.all_gather_object(os.getpid())[3])
    mean = Transfer.mean

    def mean_that_is_lost(transfer):
        result = mean(transfer)
        if name == 1 and diloco.outer_steps == at_step and diloco.comm is comm:
            assert select.select([doomed], [], [], 10)[0]
            raise PeerLostError("rank 3 was lost just before the call was complete here")
        return result

    with (
        DiLoCo(comm, [start_of(name)], every=EVERY, **given) as diloco,
        mock.patch.object(Transfer, "mean", mean_that_is_lost),
    ):
        last = at_step + 1 if name == 3 else OUTER_STEPS
        for _ in train(diloco, name, last, confirms=name != 3):
            pass
        if name == 3:
            die()
        return result_of(diloco)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("given", [{}, {"mix": 0.5}, {"delay": 2, "mix": 0.25}], ids=str)
@pytest.mark.parametrize("at_step", [2, OUTER_STEPS - 1])
def test_a_step_that_some_have_completed_is_repeated_by_all(rank_server, given, at_step):
    with rank_server.fork(4) as pool:
        pool.start(killed_behind_a_step, at_step, given)
        replies = pool.collect()

    # Ranks 0 and 2 were ahead by some steps, which were added in another order: 8 outer steps of 4
    # sums below 64, each off by at most 2**-19, times what the outer momentum makes of it.
    check(replies, [3], simulated(4, {3: at_step}, **given), within=32 * 10 * 2.0**-19)


WAYS = [
    {},
    {"fragments": 2, "delay": 1, "mix": 0.5},
    {"compression": "int8", "delay": 1},
    {"compression": Compression("topk", density=1 / 8, chunk=16), "outer": "sgd"},
    {"outer": "sgd", "lr": 1, "fragments": 2},
]


def killed_at_random(comm, moments, given):
    name, model = comm.rank, [start_of(comm.rank)[:14], start_of(comm.rank)[14:]]
    if name in moments:
        threading.Timer(moments[name], os.kill, [os.getpid(), signal.SIGKILL]).start()
    with DiLoCo(comm, model, every=EVERY, **given) as diloco:
        steps = 4 * OUTER_STEPS if name not in moments else 1 << 30
        for outer_step, _ in train(diloco, name, steps):
            if outer_step == 4 * OUTER_STEPS - 1 and name in moments:
                signal.pause()
        return result_of(diloco)


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_are_killed_at_random_moments(rank_server, seed):
    draw = np.random.default_rng(seed)
    victims = draw.choice(5, size=2, replace=False).tolist()
    moments = {victim: float(draw.uniform(0.005, 0.06)) for victim in victims}
    with rank_server.fork(5) as pool:
        pool.start(killed_at_random, moments, WAYS[seed % len(WAYS)])
        replies = pool.collect()

    found = results(replies, but=victims)
    assert len({(world_size, values.tobytes(), steps) for world_size, values, steps in found}) == 1
    assert found[0][0] == 3


def noticed_by_the_program(comm, shrinks):
    """The program finds the loss in a call of its own, and hands over what `shrink` gave it."""
    name = comm.rank
    with DiLoCo(comm, [start_of(name)], every=EVERY) as diloco:
        for place in train(diloco, name):
            if place == (2, 1):
                if name == 1:
                    die()
                try:
                    comm.barrier()
                except PeerLostError:
                    diloco.recover(comm.shrink() if shrinks else None)
                    diloco.comm.barrier()
        return result_of(diloco)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("shrinks", [True, False])
def test_a_loss_that_the_program_noticed(rank_server, shrinks):
    with rank_server.fork(3) as pool:
        pool.start(noticed_by_the_program, shrinks)
        replies = pool.collect()

    check(replies, [1], simulated(3, {1: 2}))


def left_alone(comm):
    diloco = DiLoCo(comm, [start_of(comm.rank)], every=EVERY)
    try:
        for place in train(diloco, comm.rank):
            if comm.rank == 0 and place == (1, 1):
                die()
    except ShrinkError as error:
        diloco.close()
        return type(error).__name__


def test_a_minority_may_not_go_on(rank_server):
    with rank_server.fork(2) as pool:
        pool.start(left_alone)
        replies = pool.collect()

    assert results(replies, but=[0]) == ["ShrinkError"]


# --- ranks that join, checkpoints -----------------------------------------------------------------


def lost_and_won_back(seat, given):
    """Rank 1 of 3 is killed in outer step 2; a fourth process joins the others in step 4."""
    name, joins = seat.rank, seat.rank == 3
    comm = gpucoll.join(**where(seat), timeout_s=20) if joins else begin(seat, 3)
    with comm, DiLoCo(comm, [start_of(name)], every=EVERY, **given) as diloco:
        if not joins:
            for place in train(diloco, name, 4):
                if place == (2, 1) and name == 1:
                    die()
            diloco.grow(**where(seat), wait_s=15)
        diloco.grow(**where(seat))  # nobody waits
        assert (diloco.outer_steps, diloco.steps_to_sync) == (4, EVERY)
        for _ in train(diloco, name):
            pass
        return result_of(diloco)


@pytest.mark.parametrize("given", [{}, {"compression": "int8"}], ids=str)
def test_a_lost_rank_is_won_back(rank_server, given):
    with rank_server.fork(4) as pool:
        pool.start(lost_and_won_back, given, gives="seat")
        replies = pool.collect()

    found = results(replies, but=[1])
    assert len({(world_size, values.tobytes(), steps) for world_size, values, steps in found}) == 1
    assert found[0][::2] == (3, OUTER_STEPS)


MORE_WAYS = [
    {},
    {"compression": "int8"},
    {"compression": Compression("topk", density=1 / 8, chunk=16), "outer": "sgd"},
]


def grown(comm, given):
    """Ranks 0 and 1 train alone, then rank 2 joins."""
    name = comm.rank
    few = comm.split(0 if name < 2 else None)
    if few is not None:
        diloco = DiLoCo(few, [start_of(name)], every=EVERY, **given)
        for _ in train(diloco, name, 3):
            pass
        before = diloco.parameters[0].copy()
        diloco.adopt(comm)
        few.close()
        assert (diloco.parameters[0] == before).all()
    else:
        diloco = DiLoCo(comm, [start_of(name)], every=EVERY, **given)
    assert (diloco.outer_steps, diloco.steps_to_sync, diloco.comm) == (3, EVERY, comm)
    for _ in train(diloco, name):
        pass
    residual = diloco.state_dict()["residuals"][0]
    diloco.close()
    return diloco.parameters[0], residual


@pytest.mark.parametrize("given", MORE_WAYS, ids=str)
def test_a_new_rank_gets_the_outer_state(ranks, given):
    found = ranks.call(3, grown, given)

    assert len({parameters.tobytes() for parameters, _ in found}) == 1
    assert all((residual is None) == (not given) for _, residual in found)


def joined_wrongly(comm):
    """Return each error of adopting when ranks are not ready for it; then let a rank 0 join."""
    few, texts = comm.split(0 if comm.rank else None), []
    if few is None:
        for given in ({"every": EVERY, "delay": 1}, {"every": 8, "delay": 1}):
            texts.append(error_of(DiLoCo, comm, [np.zeros(SIZE, np.float32)], **given))
        diloco = DiLoCo(comm, [np.zeros(SIZE, np.float32)], every=EVERY, delay=1)
    else:
        diloco = DiLoCo(few, [start_of(comm.rank)], every=EVERY, delay=1)
        for _ in range(EVERY - 1):
            diloco.step()
        assert "in flight" in error_of(diloco.state_dict)
        texts.append(error_of(diloco.adopt, comm))
        diloco.step()
        texts.append(error_of(diloco.adopt, comm))
        assert diloco.comm is few
        diloco.adopt(comm)
        few.close()
    assert diloco.outer_steps == 1
    assert diloco.parameters[0].tobytes() == start_of(1).tobytes()
    diloco.close()
    return texts


def error_of(function, *args, **given):
    with pytest.raises(GpucollError) as caught:
        function(*args, **given)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_ranks_that_cannot_join_are_told_on_every_rank(ranks):
    texts = ranks.call(3, joined_wrongly)

    assert texts[0] == texts[1] == texts[2]
    assert texts[0][0].startswith("StateError: on rank 1 of 3 a fragment is in flight: call adopt")
    assert texts[0][1].startswith("MismatchError: DiLoCo: every is 8 on rank 0 of 3, but 4 on rank")


def interrupted(comm, given):
    """Return what training comes to without a break, and over a checkpoint."""
    ends = []
    for breaks in (False, True):
        diloco = DiLoCo(comm, [start_of(comm.rank)], every=EVERY, **given)
        if breaks:
            for _ in train(diloco, comm.rank, 3):
                pass
            saved = [{**diloco.state_dict()}, diloco.parameters[0].copy()]
            diloco.close()
            diloco = DiLoCo(comm, [np.zeros(SIZE, np.float32)], every=EVERY, **given)
            diloco.load_state_dict(saved[0])
            diloco.parameters[0][:] = saved[1]
        for _ in train(diloco, comm.rank):
            pass
        ends.append(diloco.parameters[0].tobytes())
        diloco.close()
    return ends


@pytest.mark.parametrize("given", MORE_WAYS, ids=str)
def test_a_checkpoint(ranks, given):
    ends = ranks.call(2, interrupted, given)

    assert ends[0] == ends[1]
    assert ends[0][0] == ends[0][1]


@pytest.mark.ranks(2)
def test_checkpoints_that_do_not_fit(comm):
    with DiLoCo(comm, [np.zeros(3), np.zeros(2)], every=2) as diloco:
        state = diloco.state_dict()
        with pytest.raises(ValueError, match="read-only"):
            state["values"][0][0] = 1
        odd = {**state, "values": [np.zeros(4)]}
        with pytest.raises(GpucollError, match=r"fragments of \[4\] values, not of \[5\]"):
            diloco.load_state_dict(odd if comm.rank == 1 else state)
        with pytest.raises(GpucollError, match="outer_steps, local_steps is"):
            diloco.load_state_dict({**state, "outer_steps": comm.rank})
        with pytest.raises(GpucollError, match="the checksum of values is"):
            diloco.load_state_dict({**state, "values": [np.full(5, comm.rank)]})
        with pytest.raises((KeyError, GpucollError)):
            diloco.load_state_dict({} if comm.rank == 1 else state)
        diloco.load_state_dict(state)
    with pytest.raises(StateError, match="closed"):
        diloco.load_state_dict(state)


@pytest.mark.ranks(2)
def test_closing_with_a_fragment_in_flight(comm):
    model = [np.full(300_000, float(comm.rank))]
    with DiLoCo(comm, model, every=2, delay=1) as diloco:
        diloco.step()
        assert not diloco.outer_steps
    comm.check()
    assert comm.all_reduce(1) == 2


def raised_by_one(comm):
    try:
        with comm, DiLoCo(comm, [start_of(comm.rank)], every=EVERY, delay=1) as diloco:
            for place in train(diloco, comm.rank):
                if comm.rank == 2 and place == (3, 3):
                    raise KeyError("an error of the program")
            return result_of(diloco)
    except KeyError:
        return None


def test_an_error_of_one_ranks_program_leaves_the_others_going(ranks):
    found = ranks.call(3, raised_by_one)

    assert found[2] is None
    assert found[0][0] == 2
    assert found[0][1].tobytes() == found[1][1].tobytes()
