"""Make the group of a job's ranks, on one host or on several."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from gpucoll.group.host.channel import ControlChannel
from gpucoll.group.host.group import HostGroup
from gpucoll.group.host.joining import join as join_host
from gpucoll.group.host.members import Members
from gpucoll.group.protocol import Channel, Group
from gpucoll.rendezvous.job import Job
from gpucoll.rendezvous.meeting import Watch
from gpucoll.transport.shared.layout import Tuning

Introductions = list[dict[str, Any]]


class Policy(NamedTuple):
    """The decisions that are taken when the ranks of a host have met.

    Attributes
    ----------
    tune : callable
        Called on the host's first rank with all introductions; returns the `Tuning` for all.
    waiting : callable
        Called on every rank; returns how often a wait spins, and yields, before it sleeps.
    """

    tune: Callable[[Introductions], Tuning]
    waiting: Callable[[Introductions], tuple[int, int]]


class Met(NamedTuple):
    """The result of a meeting on one rank.

    Attributes
    ----------
    group, channel
        The ranks, and what moves bytes between all of them.
    introductions : list of dict
        The ranks' introductions, by rank.
    spans_hosts : bool
        Whether the ranks are on several hosts.
    """

    group: Group
    channel: Channel
    introductions: Introductions
    spans_hosts: bool


def join(
    job: Job,
    policy: Policy,
    meet_timeout_s: float,
    timeout_s: float,
    facts: dict[str, Any],
    same: dict[str, Any],
    watch: Watch | None = None,
) -> Met:
    """Meet the ranks of `job`; return their group, whose waits take `timeout_s` at most.

    If all ranks turn out to be on one host, the group is the same as that of a job that cannot span
    hosts. See `gpucoll.group.host.joining.join` for `facts`, `same`, `watch` and the errors.
    """
    if job.meet is None:
        members = join_host(job, policy.tune, meet_timeout_s, facts, same, watch)
        return _on_one_host(members, policy, timeout_s, members.introductions)
    # A job on one host loads none of these modules.
    from gpucoll.group.world.ballots import Ballots
    from gpucoll.group.world.board import Board
    from gpucoll.group.world.channel import WorldChannel
    from gpucoll.group.world.group import WorldGroup
    from gpucoll.group.world.joining import join_world
    from gpucoll.group.world.reunion import MeetingPlaces

    joined = join_world(job, policy.tune, meet_timeout_s, facts, same, watch)
    members, hosts = joined.members, joined.hosts
    if hosts.count == 1:
        return _on_one_host(members, policy, timeout_s, joined.introductions)
    host = HostGroup(members, timeout_s, policy.waiting(members.introductions))
    try:
        board_fd, bell_fd, listener_fd, ballots_fd = members.further_fds
        board = Board(board_fd, members.world_size, hosts.world_size)
        os.close(board_fd)
        ballots = Ballots(ballots_fd, hosts.world_size)
        os.close(ballots_fd)
        leaders = [joined.introductions[ranks[0]]["address"] for ranks in hosts.ranks]
        places = MeetingPlaces(joined.group, leaders, listener_fd, joined.credentials)
        group = WorldGroup(host, joined, board, bell_fd, places, ballots)
    except BaseException:
        host.close()
        raise
    return Met(group, WorldChannel(group), joined.introductions, True)


def _on_one_host(
    members: Members, policy: Policy, timeout_s: float, introductions: Introductions
) -> Met:
    group = HostGroup(members, timeout_s, policy.waiting(members.introductions))
    return Met(group, ControlChannel(group), introductions, False)
