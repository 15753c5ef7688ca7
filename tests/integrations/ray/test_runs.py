"""Functions on the actors of a Ray cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from tests.integrations.engine.cases import WAIT_S, RunCases, total, who

import gpucoll
from gpucoll.integrations.ray import Workers, run

SMALL: Any = {"num_cpus": 0.1}


@pytest.fixture(scope="module")
def kept(cluster):
    """Workers by their number: to start them takes seconds."""
    kept: dict[int, list[Workers]] = {}
    yield kept
    for workers in (one for same in kept.values() for one in same):
        workers.close()


class TestRuns(RunCases):
    @pytest.fixture
    def make(self, kept):
        taken: list[int] = []

        def make(world_size):
            taken.append(world_size)
            same = kept.setdefault(world_size, [])
            if len(same) < taken.count(world_size):
                same.append(Workers(world_size, **SMALL, resources={"host-a": 1}))
            return same[taken.count(world_size) - 1]

        return make

    @pytest.fixture
    def spare(self, cluster):
        import ray

        def spare(function, argument):
            options = {"num_cpus": 0, "resources": {"host-b": 1}}
            reference = ray.remote(**options)(function).remote(argument)
            return lambda: ray.get(reference, timeout=WAIT_S)

        return spare


def is_free(node):
    """Return whether none of the tests' workers is on a node."""
    import ray

    return ray.available_resources().get(node) == ray.cluster_resources()[node]


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def placed(comm):
    return os.environ["GPUCOLL_HOST_ID"], dict(comm.describe().facts).get("hosts", "")


def test_ranks_are_numbered_node_by_node_and_nodes_are_hosts(cluster):
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([{"CPU": 0.1, f"host-{host}": 1} for host in "abab"])
    try:
        results = run(placed, placement_group=group, **SMALL)
    finally:
        remove_placement_group(group)

    assert [host for host, _ in results] == ["host a"] * 2 + ["host b"] * 2
    assert all("ranks 0, 1" in facts and "ranks 2, 3" in facts for _, facts in results)


def test_a_placement_group_of_the_callers(cluster):
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([{"CPU": 0.1, "host-b": 1}] * 2)
    try:
        for world_size, expected in ((None, 2), (1, 1)):
            with Workers(world_size, placement_group=group, **SMALL) as workers:
                assert workers.world_size == expected
                assert len(workers.run(who)) == expected
        with pytest.raises(gpucoll.ArgumentError, match=r"world_size is 3, but .* has 2 bundles"):
            Workers(3, placement_group=group)
        with pytest.raises(gpucoll.ArgumentTypeError, match="must be a PlacementGroup; got str"):
            Workers(2, placement_group="group")
        assert ray.util.placement_group_table(group)["state"] == "CREATED"
    finally:
        remove_placement_group(group)


def test_references_arrive_as_what_they_refer_to(cluster):
    import ray

    scale = ray.put(3.0)
    assert run(total, (scale,), {"shift": scale}, world_size=1, **SMALL)[0].tolist() == [6.0] * 3


def test_large_results_and_arguments(cluster):
    numbers = np.arange(1_000_000.0)
    results = run(lambda comm, x: comm.all_reduce(x), (numbers,), world_size=2, **SMALL)

    assert all((result == 2 * numbers).all() for result in results)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "give world_size or placement_group"),
        ({"world_size": 2, "num_cpus": 0}, "each worker must reserve some resource"),
        ({"world_size": 2, "strategy": "RANDOM"}, "strategy must be one of PACK.*got 'RANDOM'"),
    ],
)
def test_wrong_arguments(cluster, options, text):
    with pytest.raises(gpucoll.ArgumentError, match=text):
        Workers(**options)


def test_a_cluster_without_room(cluster):
    text = "no room for 2 workers of 1 CPU, 1 GPU each within 1 s; free: .* CPU"
    with pytest.raises(gpucoll.DeadlineError, match=text):
        Workers(2, num_gpus=1, ready_s=1)


def test_closed_workers(cluster):
    workers = Workers(1, **SMALL)
    workers.close()
    workers.close()
    with pytest.raises(gpucoll.StateError, match="these workers are closed"):
        workers.run(who)


def refuse_to_start(comm):
    raise AssertionError


def test_nothing_is_left_in_the_cluster(cluster):
    import ray
    from ray.util.placement_group import placement_group_table

    before = {*placement_group_table()}
    with Workers(2, **SMALL) as workers:
        pids = [place[2] for place in workers.run(who)]
        actors = [*(worker.actor.describe for worker in workers._workers), workers._keys.clear]
        with pytest.raises(AssertionError):
            workers.run(refuse_to_start)

    until(lambda: not any(is_there(pid) for pid in pids))
    for method in actors:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(method.remote())
    after = placement_group_table()
    assert {after[name]["state"] for name in after.keys() - before} == {"REMOVED"}


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


INTERRUPTED = """\
import sys, ray
from pathlib import Path
from gpucoll.integrations.ray import Workers

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
def begin(comm, folder):
    Path(folder, str(comm.rank)).touch()
    comm.recv_object(1 - comm.rank)

with Workers(2, num_cpus=0.1, resources={"host-b": 1}) as workers:
    try:
        workers.run(begin, (sys.argv[2],))
    except KeyboardInterrupt:
        print(workers.run(lambda comm: comm.all_reduce(1)))
"""


def test_ctrl_c(cluster, tmp_path):
    driver = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, cluster.address, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        until(lambda: len(list(tmp_path.iterdir())) == 2 or driver.poll() is not None)
        driver.send_signal(signal.SIGINT)
        said, _ = driver.communicate(timeout=WAIT_S)
    finally:
        driver.kill()
        driver.wait()

    assert driver.returncode == 0, said
    assert said.rstrip().endswith("[2, 2]"), said
    until(lambda: is_free("host-b"))
