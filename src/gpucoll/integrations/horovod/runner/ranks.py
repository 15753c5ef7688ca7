"""The ranks that ``horovodrun`` starts on this host."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gpucoll.integrations.horovod.settings import Place
from gpucoll.launcher.arguments import Options
from gpucoll.launcher.cli import Run
from gpucoll.launcher.output import LineAssembler
from gpucoll.launcher.rank_process import STDOUT, RankCommand

__all__ = ["LocalJob", "Slot", "assigned", "with_door"]

_PYTHON = re.compile(r"python[0-9.]*")
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
DOOR = ("-m", "gpucoll.integrations.horovod")


class Slot(NamedTuple):
    """A place for a rank on a host."""

    host: str
    number: int


def assigned(hosts: Mapping[str, int], most: int | None = None) -> list[Slot]:
    """Return the slots in rank order: each host's, one after the other; the first `most`."""
    return [Slot(host, number) for host, slots in hosts.items() for number in range(slots)][:most]


def with_door(command: Sequence[str]) -> list[str]:
    """Return a command of Python in which the program finds ``horovod``; others as they are."""
    words = list(command)
    if not words or not _PYTHON.fullmatch(Path(words[0]).name):
        return words
    place = 1
    while place < len(words) and words[place].startswith("-") and words[place] not in ("-m", "-c"):
        place += 2 if words[place] in _WITH_VALUE else 1
    if place >= len(words) or tuple(words[place : place + 2]) == DOOR:
        return words
    return [*words[:place], *DOOR, *words[place:]]


def places(slots: Sequence[Slot]) -> list[Place]:
    """Return each rank's place in the job."""
    hosts = list(dict.fromkeys(slot.host for slot in slots))
    found = []
    for rank, slot in enumerate(slots):
        local_size = sum(other.host == slot.host for other in slots)
        alike = [host for host in hosts if Slot(host, slot.number) in slots]
        cross_rank = alike.index(slot.host)
        found.append(
            Place(
                rank,
                len(slots),
                slot.number,
                local_size,
                cross_rank,
                len(alike),
                hostname=slot.host,
            )
        )
    return found


class LocalJob(Run):
    """A job whose ranks are all on this host.

    Parameters
    ----------
    args : argparse.Namespace
        The command line.
    options : Options
        Those of gpucoll's launcher.
    slots : sequence of Slot
        In rank order.
    environment : mapping
        What the command line sets for ranks.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        options: Options,
        slots: Sequence[Slot],
        environment: Mapping[str, str],
    ) -> None:
        super().__init__(options)
        self.slots = slots
        self.environment = environment
        self._folder = Path(args.output_filename) if args.output_filename else None
        self._timed: dict[tuple[int, int], LineAssembler] | None = (
            {} if args.prefix_output_with_timestamp else None
        )

    def first_commands(self) -> list[RankCommand]:
        """Return the command of each rank's first process, which knows its place."""
        return [
            command._replace(
                environment={**command.environment, **self.environment, **place.variables()}
            )
            for command, place in zip(super().first_commands(), places(self.slots), strict=True)
        ]

    def show(self, rank: int, stream: int, data: bytes) -> None:
        """Relay what a rank wrote, and keep it in the rank's file."""
        if self._folder is not None:
            name = "stdout" if stream == STDOUT else "stderr"
            folder = self._folder / f"rank.{rank:0{len(str(len(self.slots) - 1))}}"
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / name).open("ab") as file:
                file.write(data)
        if self._timed is not None:
            lines = self._timed.setdefault((rank, stream), LineAssembler())
            whole = lines.feed(data) if data else lines.finish()
            when = time.strftime("%a %b %d %H:%M:%S %Y ").encode()
            if data and not whole:
                return
            super().show(rank, stream, b"".join(when + line + b"\n" for line in whole))
            if data:
                return
            data = b""
        super().show(rank, stream, data)
