"""Over how many connections, and from which interfaces, large arrays go to each other host.

Each lane is one connection between any two leaders, which listen for it at a port of its own. Lanes
take the interfaces of ``GPUCOLL_INTERFACES`` in turn: the first of one host is connected with the
first of the other, and so on. Where hosts have different numbers of them the least is used.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from gpucoll import config
from gpucoll.errors import ArgumentError
from gpucoll.group.world.bulk import Lane
from gpucoll.rendezvous.addresses import is_place
from gpucoll.rendezvous.tcp import listen_at
from gpucoll.topology.interfaces import chosen_addresses


def further_listeners(first: socket.socket, who: str) -> list[socket.socket]:
    """Return what a rank listens at for all lanes but the first one, which comes to `first`."""
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
    """Return this host's addresses on the interfaces asked for, that of `first` in front."""
    own = str(first.getsockname()[0])
    try:
        chosen = chosen_addresses(first.family)
    except ArgumentError:  # not all have an address of this family
        return [own]
    return list(dict.fromkeys([own, *chosen])) if own in chosen else [own]


def places_of(listeners: Sequence[socket.socket]) -> list[list[Any]]:
    """Return what other hosts are told of them."""
    return [list(listener.getsockname()[:2]) for listener in listeners]


def check_places(told: object) -> None:
    """Raise ValueError unless this can have been told."""
    if not isinstance(told, list) or not all(map(is_place, told)):
        raise ValueError("without the addresses for large arrays")


def lanes_of(
    listener: socket.socket, further: list[socket.socket], leaders: list[dict[str, Any]]
) -> list[Lane]:
    """Return the lanes of a leader, with descriptors of their own.

    Parameters
    ----------
    listener, further : socket and list of socket
        What it listens at.
    leaders : list of dict
        What the leader of each host told: ``address`` and ``lanes``.
    """
    count = 1 + min(len(leader["lanes"]) for leader in leaders)
    lanes: list[Lane] = []
    for number, own in enumerate([listener, *further][:count]):
        places = [[leader["address"], *leader["lanes"]][number] for leader in leaders]
        lanes.append(Lane(own.dup(), tuple((str(host), int(port)) for host, port in places)))
    return lanes
