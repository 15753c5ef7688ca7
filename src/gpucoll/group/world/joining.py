"""Let the ranks of a job meet over TCP, then those of each host, then the leaders.

If all ranks turn out to be on one host they form a `HostGroup`, exactly as if they had met there.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from gpucoll import config
from gpucoll.errors import RendezvousError
from gpucoll.group.host.joining import check_facts, join
from gpucoll.group.host.members import Members
from gpucoll.group.world import ballots, board, connecting, lanes
from gpucoll.group.world.bulk import Bulk
from gpucoll.group.world.exchanges import Connections
from gpucoll.group.world.hosts import Hosts, neighbours, partners
from gpucoll.group.world.links import Links
from gpucoll.group.world.listeners import Listeners
from gpucoll.group.world.pairs import Pairs
from gpucoll.hashing import blake2b
from gpucoll.rendezvous import frames
from gpucoll.rendezvous.addresses import is_place
from gpucoll.rendezvous.job import Job
from gpucoll.rendezvous.meet import Meeting, Watch, meet
from gpucoll.rendezvous.meeting_points import HandedPoint
from gpucoll.rendezvous.meeting_store import given_secret
from gpucoll.rendezvous.tcp import TcpEndpoint
from gpucoll.topology.host_identity import host_id, network_id
from gpucoll.transport.shared.layout import Tuning
from gpucoll.transport.tcp.credentials import Credentials
from gpucoll.version import __version__

PROTOCOL = 2
"""Version of the messages between leaders."""
_LINKS_SHARE = 0.9
"""Share of the time to meet that is for links.

So leaders give up a little sooner than rank 0, which knows less of the links.
"""


@dataclass
class Joined:
    """The result of a meeting on one rank.

    Attributes
    ----------
    members : Members
        What the ranks of this host share.
    hosts : Hosts
        Which ranks are on which host.
    names : tuple of str
        What errors call the hosts.
    links : Links or None
        The links to the other hosts, if this rank is a leader.
    bulk : Bulk or None
        The connections for large arrays, if this rank is a leader.
    connections : Connections or None
        The connections for small calls, if this rank is a leader.
    pairs : Pairs or None
        What connects this rank to ranks of other hosts; None if all ranks are on one host.
    introductions : list of dict
        The ranks' introductions, by rank.
    credentials : Credentials
        By which the ranks authenticate each other, also when parts of them meet anew.
    address : str
        Address of this host on the interface that is used.
    group : str
        The group's secret name.
    """

    members: Members
    hosts: Hosts
    names: tuple[str, ...]
    links: Links | None
    bulk: Bulk | None
    connections: Connections | None
    pairs: Pairs | None
    introductions: list[dict[str, Any]]
    credentials: Credentials
    address: str
    group: str

    def leave(self) -> None:
        """Release everything, after another rank has failed to join."""
        if self.links is not None:
            self.links.drop()
        if self.bulk is not None:
            self.bulk.close()
        if self.connections is not None:
            self.connections.close()
        if self.pairs is not None:
            self.pairs.close()
        self.members.leave()


class _Meanwhile(Watch):
    """Watches the meeting of one host's ranks through the meeting of all ranks."""

    def __init__(self, meeting: Meeting, host: tuple[int, ...], watch: Watch) -> None:
        super().__init__(meeting.job.rank, meeting.job.world_size)
        self.call = watch.call
        self._look = meeting.look
        self._host = host

    def number(self, rank: int) -> int:
        return self._host[rank]

    def check(self, awaited: Collection[int]) -> tuple[int, str] | None:
        self._look()
        return None


def join_world(
    job: Job,
    tune: Callable[[list[dict[str, Any]]], Tuning],
    timeout_s: float,
    facts: dict[str, Any],
    same: dict[str, Any],
    watch: Watch | None = None,
) -> Joined:
    """Meet the ranks of `job`, which may be on several hosts, and connect them.

    ``job.meet`` is the meeting point. See `gpucoll.group.host.joining.join` for the other
    parameters and the errors.
    """
    assert job.meet is not None
    watch = watch or Watch(job.rank, job.world_size)
    # A point that was handed over comes with its secret, whatever the environment specifies.
    secret = None if isinstance(job.meet, HandedPoint) else given_secret(job.meet)
    endpoint = TcpEndpoint(job.meet, secret, job.title, watch.who)
    _ = endpoint.secret if job.rank == 0 else None  # raises at once, not at the first connection
    listeners = Listeners(endpoint.own_address(), watch.who)
    try:
        return meet(
            job,
            _introduction(job, listeners, facts, same),
            [],
            check=lambda other, _: _check(other, facts),
            decide=_decide,
            settle=lambda meeting: _settle(
                meeting, tune, timeout_s, endpoint, listeners, watch, facts, same
            ),
            undo=lambda joined: joined.leave(),
            timeout_s=timeout_s,
            watch=watch,
            endpoint=endpoint,
        )
    finally:
        listeners.close()


def _introduction(
    job: Job, listeners: Listeners, facts: dict[str, Any], same: dict[str, Any]
) -> dict[str, Any]:
    address, port = listeners.first.getsockname()[:2]
    return {
        "rank": job.rank,
        "pid": os.getpid(),
        "host": host_id(),
        "network": network_id(),
        "name": socket.gethostname()[:64],
        "address": [address, port],
        "lanes": lanes.places_of(listeners.further),
        "message_port": listeners.messages.getsockname()[1],
        "same": {
            "world_size": job.world_size,
            "the version of gpucoll": __version__,
            "the protocol between hosts": PROTOCOL,
            **same,
        },
        **facts,
    }


def _check(introduction: dict[str, Any], facts: dict[str, Any]) -> None:
    """Raise ValueError unless this is a valid introduction."""
    address: Any = introduction.get("address")
    if not is_place(address):
        raise ValueError("without an address")
    lanes.check_places(introduction.get("lanes"))
    if not is_place([address[0], introduction.get("message_port")]):
        raise ValueError("without a port for messages")
    for name in ("host", "network", "name"):
        if type(introduction.get(name)) is not str:
            raise ValueError(f"without its {name}")
    check_facts(introduction, facts)


def _decide(introductions: list[dict[str, Any]]) -> tuple[dict[str, Any], list[int]]:
    """Return, on rank 0, the group's secret name, which nobody can guess.

    Raises
    ------
    RendezvousError
        Two ranks claim to share a host and cannot; all ranks get this error.
    """
    first: dict[str, dict[str, Any]] = {}
    for introduction in introductions:
        other = first.setdefault(introduction["host"], introduction)
        if other["network"] != introduction["network"]:
            found = " and ".join(
                f"rank {each['rank']} (on {each['name']} at {each['address'][0]})"
                for each in (other, introduction)
            )
            raise RendezvousError(
                f"{found} report the same host, {introduction['host'][:80]!r}, but are on "
                "different machines or in different network namespaces, so they share no memory: "
                f"give {config.HOST_ID} another value on each host, or unset it"
            )
    return {"group": secrets.token_hex(16)}, []


def _make_further(n_here: int, hosts: Hosts, listener: socket.socket) -> list[int]:
    """Return descriptors for all ranks of a host: its board, bell, listener and ballots."""
    made = board.create(n_here, hosts.world_size)
    try:
        made.append(os.dup(listener.fileno()))
        made.append(ballots.create(hosts.world_size))
    except BaseException:
        frames.close_all(made)
        raise
    return made


def _names(introductions: list[dict[str, Any]], hosts: Hosts) -> tuple[str, ...]:
    """Return the hosts' names for errors, with as many details as tell them apart."""
    leaders = [introductions[ranks[0]] for ranks in hosts.ranks]
    names = [leader["name"] for leader in leaders]
    if len(set(names)) < len(names):
        names = [f"{leader['name']} at {leader['address'][0]}" for leader in leaders]
    if len(set(names)) < len(names):  # several of one network namespace
        names = [f"{leader['name']} ({leader['host']})"[:80] for leader in leaders]
    return tuple(names)


def _identity(group: str) -> str:
    """Return what observers know a group by: its secret name does not follow from that."""
    return blake2b(group.encode(), digest_size=8, person=b"gpucoll why").hexdigest()


def _settle(
    meeting: Meeting,
    tune: Callable[[list[dict[str, Any]]], Tuning],
    timeout_s: float,
    endpoint: TcpEndpoint,
    listeners: Listeners,
    watch: Watch,
    facts: dict[str, Any],
    same: dict[str, Any],
) -> Joined:
    """Meet the ranks of this host, and connect its leader to other hosts."""
    deadline = time.monotonic() + _LINKS_SHARE * timeout_s
    introductions, group = meeting.introductions, str(meeting.decision["group"])
    hosts = Hosts.of([introduction["host"] for introduction in introductions])
    rank = meeting.job.rank
    here = hosts.host_of(rank)
    ranks = hosts.ranks[here]
    spans = hosts.count > 1
    names = _names(introductions, hosts)
    local = meeting.job._replace(
        rank=hosts.place_of(rank),
        world_size=len(ranks),
        token=f"{group}/{here}",
        meet=None,
        numbers=(*ranks, *hosts.elsewhere(here)) if spans else (),
        total=hosts.world_size if spans else 0,
        host=names[here],
        group=_identity(group) if spans else "",
    )
    address = str(listeners.first.getsockname()[0])
    credentials = endpoint.credentials
    members = join(
        local,
        lambda found: tune(found)._replace(other_hosts=hosts.count - 1),
        timeout_s,
        facts,
        same,
        watch=_Meanwhile(meeting, ranks, watch),
        make_further=lambda: _make_further(len(ranks), hosts, listeners.first) if spans else [],
    )
    joined = Joined(
        members, hosts, names, None, None, None, None, introductions, credentials, address, group
    )
    try:
        if spans:
            ends = [(each["address"][0], each["message_port"]) for each in introductions]
            joined.pairs = Pairs(rank, ends, credentials, group, listeners.messages.dup())
        if spans and local.rank == 0:
            leaders = [introductions[ranks[0]] for ranks in hosts.ranks]
            own = lanes.lanes_of(listeners.first, listeners.further, leaders)
            joined.bulk = Bulk(here, names, own, credentials, group)
            near = partners(here, hosts.count)
            joined.connections = Connections(
                here,
                names,
                {host: leaders[host]["address"] for host in near},
                credentials,
                group,
                listeners.first.dup(),
            )
            addresses = {host: leaders[host]["address"] for host in neighbours(here, hosts.count)}
            purpose = connecting.purpose_of(group)
            task = connecting.Connecting(here, joined.names, addresses, credentials, purpose)
            joined.links = task.run(listeners.first, members.further_fds[1], meeting.look, deadline)
    except BaseException:
        joined.leave()
        raise
    return joined
