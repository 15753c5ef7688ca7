"""Ranks that a launcher has started: the communicator carries the driver's commands."""

from __future__ import annotations

from typing import Any

from gpucoll.bench.groups import GroupError
from gpucoll.bench.rank.library import Library
from gpucoll.bench.rank.session import Session
from gpucoll.bench.rank_processes import Answer

__all__ = ["LaunchedGroup", "follow"]


class LaunchedGroup:
    """The ranks of the communicator; this process is rank 0.

    Parameters
    ----------
    comm : Communicator
        Carries the commands.
    library : Library
        The measured library, on the same communicator.
    """

    def __init__(self, comm: Any, library: Library) -> None:
        self.name = "gpucoll"
        self.ranks: int = comm.world_size
        self._comm = comm
        self._session = Session(library)
        described = self.call("describe", 0.0)
        self.versions: dict[str, str] = described[0]["versions"]
        masks = [one["cpus"] for one in described]
        self.cpus: list[int] = [cpus[0] for cpus in masks if len(cpus) == 1]
        """The CPU of each rank if the launcher has bound each to one, else empty."""
        if len(self.cpus) != self.ranks:
            self.cpus = []

    def call(self, do: str, timeout_s: float, **arguments: Any) -> list[Answer]:
        """Make every rank execute a command; return their answers in rank order.

        The communicator's own deadline applies, not `timeout_s`.
        """
        command = self._comm.broadcast_object({"do": do, **arguments}, root=0)
        answers: list[Answer] = self._comm.gather_object(self._session.answer(command), root=0)
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise GroupError(
                    f"gpucoll: rank {rank} of {self.ranks}: {answer['error']} "
                    f"(while {do} {arguments})\n{answer['traceback'].rstrip()}"
                )
        return answers

    def close(self) -> None:
        """Let the other ranks finish."""
        self._session.release()
        self._comm.broadcast_object({"do": "finish"}, root=0)


def follow(comm: Any, library: Library) -> None:
    """Execute rank 0's commands until it sends ``finish``."""
    session = Session(library)
    while (command := comm.broadcast_object(None, root=0))["do"] != "finish":
        comm.gather_object(session.answer(command), root=0)
    session.release()
