"""The lanes: how many connections to each other host large arrays use, and their interfaces.

A lane is one connection between each pair of leaders, for which each leader listens at a port of
its own. Lanes use the interfaces of ``GPUCOLL_INTERFACES`` in turn: the first interface of one host
is connected to the first of the other, and so on. If the hosts have different numbers of lanes, all
use the smallest.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from gpucoll import config
from gpucoll.errors import ArgumentError
from gpucoll.group.world.bulk import Lane
from gpucoll.group.world.hosts import Hosts
from gpucoll.rendezvous.addresses import is_place
from gpucoll.rendezvous.tcp import listen_at
from gpucoll.topology.interfaces import chosen_addresses


def further_listeners(first: socket.socket, who: str) -> list[socket.socket]:
    """Return a rank's listening sockets for all lanes but the first one, which uses `first`."""
    addresses = _addresses(first)
    count = len(addresses) * config.sockets()
    made: list[socket.socket] = []
    try:
        for lane in range(1, count):
            address = addresses[lane % len(addresses)]
            made.append(listen_at(address, 0, f"{who} cannot listen for large arrays"))
    except BaseException:
        for listener in made:
            listener.close()
        raise
    return made


def _addresses(first: socket.socket) -> list[str]:
    """Return this host's addresses on the chosen interfaces, the address of `first` in front."""
    own = str(first.getsockname()[0])
    try:
        chosen = chosen_addresses(first.family)
    except ArgumentError:  # an interface has no address of this family
        return [own]
    return list(dict.fromkeys([own, *chosen])) if own in chosen else [own]


def places_of(listeners: Sequence[socket.socket]) -> list[list[Any]]:
    """Return the listeners' addresses, as other hosts receive them."""
    return [list(listener.getsockname()[:2]) for listener in listeners]


def check_places(told: object) -> None:
    """Raise ValueError unless these are such addresses."""
    if not isinstance(told, list) or not all(map(is_place, told)):
        raise ValueError("without the addresses for large arrays")


def lanes_of(
    listener: socket.socket, further: list[socket.socket], leaders: list[dict[str, Any]]
) -> list[Lane]:
    """Return the lanes of a leader, with descriptors of their own.

    Parameters
    ----------
    listener, further : socket and list of socket
        The leader's listening sockets.
    leaders : list of dict
        The introduction of each host's leader: ``address`` and ``lanes``.
    """
    count = _count(leaders)
    lanes: list[Lane] = []
    for number, own in enumerate([listener, *further][:count]):
        places = [[leader["address"], *leader["lanes"]][number] for leader in leaders]
        lanes.append(Lane(own.dup(), tuple((str(host), int(port)) for host, port in places)))
    return lanes


def _count(leaders: list[dict[str, Any]]) -> int:
    return 1 + min(len(leader["lanes"]) for leader in leaders)


def has_lanes(introductions: list[dict[str, Any]], hosts: Hosts) -> bool:
    """Return whether leaders have several lanes, from the introductions by rank."""
    return _count([introductions[ranks[0]] for ranks in hosts.ranks]) > 1
