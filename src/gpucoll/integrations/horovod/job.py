"""This process in the job: the ranks, and an engine for each process set."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import gpucoll
from gpucoll import GpucollError
from gpucoll.integrations.horovod.engine.engine import Engine, Options
from gpucoll.integrations.horovod.engine.exchange import WAIT_S
from gpucoll.integrations.horovod.exceptions import HorovodInternalError
from gpucoll.integrations.horovod.settings import (
    OF_ALL,
    Place,
    Settings,
    settings_of,
    warn_of_ignored,
)
from gpucoll.integrations.horovod.stalls import StallCheck
from gpucoll.integrations.horovod.timeline import Timeline
from gpucoll.integrations.hosts import colour_of_host

if TYPE_CHECKING:
    from gpucoll import Communicator

__all__ = ["Job", "job"]

_NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


class Job:
    """What `init` makes and `shutdown` ends."""

    def __init__(self) -> None:
        self.engines: dict[int, Engine] = {}
        """Of the process sets that this rank is in, by number; 0: all ranks."""
        self.sets: dict[int, list[int]] = {}
        """The ranks of all process sets."""
        self.timeline: Timeline | None = None
        self._service: Communicator | None = None
        self._options = Options()
        self._stalls: StallCheck | None = None
        self._n_begun = 0
        self._pid = 0
        """Of the process that met the others: those that it forks have no part in the job."""
        self._places: list[tuple[int, int]] = []
        self._lock = threading.RLock()
        atexit.register(self._end_at_exit)

    # --- beginning and end ------------------------------------------------------------------------

    @property
    def is_initialized(self) -> bool:
        return self._service is not None

    def begin(self, comm: Sequence[int] = ()) -> None:
        """Meet the other ranks. If that fails, `world` may be there: `end` closes it."""
        limit = settings_of().start_timeout_s or None  # raises before this attempt counts
        self._n_begun += 1
        world = gpucoll.init(name=f"horovod {self._n_begun}", timeout_s=limit)
        if len(set(comm)) < len(comm) or not set(comm) <= {*range(world.world_size)}:
            world.close()
            raise ValueError(
                f"init: comm has ranks between 0 and {world.world_size - 1}, each once; got "
                f"{list(comm)}"
            )
        if comm and len(comm) < world.world_size:
            part = world.split(min(comm) if world.rank in comm else None)
            world.close()
            if part is None:
                raise ValueError(f"init: rank {world.rank} is not among the ranks {list(comm)}")
            world = part
        self.adopt(world)

    def adopt(self, world: Communicator) -> None:
        """Go on with these ranks: at the beginning, and after ranks were lost or have come.

        Parameters
        ----------
        world : Communicator
            The job has it for itself, and closes it. The engine works on a duplicate: whatever
            ranks were doing when one was lost, all of them shrink this one.
        """
        self._service, self._pid = world, os.getpid()
        known = self._settings()
        if known.log_level:
            level = known.log_level.replace("TRACE", "DEBUG")
            logging.getLogger("gpucoll.horovod").setLevel(level)
        self._options = Options(known.cycle_time_s, known.fusion_threshold_bytes)
        if known.timeline not in ("", "DYNAMIC") and world.rank == 0:
            self.timeline = Timeline(known.timeline, known.timeline_mark_cycles)
        self.engines = {0: Engine(world.duplicate(), self._options, self.timeline)}
        self.sets = {0: list(range(world.world_size))}
        self._place()
        warn_s, fail_s = known.stall_check_s * known.stall_check, known.stall_shutdown_s
        if world.world_size > 1 and (warn_s or fail_s):
            watch = world.duplicate()
            self._stalls = StallCheck(watch, self.engines, self.sets, warn_s, fail_s)
        name = Place.hostname_here()
        place = Place(world.rank, world.world_size, *self.local(), *self.cross(), name)
        os.environ.update(place.variables())
        warn_of_ignored(world.rank)

    def _settings(self) -> Settings:
        """Return the settings: rank 0's, where ranks must have the same."""
        settings = settings_of()
        of_all = self.world.broadcast_object({name: getattr(settings, name) for name in OF_ALL}, 0)
        return replace(settings, **of_all)

    def end(self) -> None:
        """Close everything; other ranks' calls that need this rank raise."""
        with self._lock:
            if (service := self._service) is not None:
                try:
                    self.release()
                finally:
                    service.close()

    def release(self) -> Communicator:
        """Close everything but `world`, and return that, for `adopt`.

        What is pending fails. Other ranks' calls that need this rank raise; they may still run.
        """
        with self._lock:
            self.check()
            service, self._service = self._service, None
            assert service is not None
            if self._stalls is not None:
                self._stalls.stop()
                self._stalls = None
            for engine in reversed([*self.engines.values()]):
                engine.close()
            if self.timeline is not None:
                self.timeline.close()
            self.engines, self.sets, self.timeline = {}, {}, None
            return service

    def _end_at_exit(self) -> None:
        if self._service is None or os.getpid() != self._pid:
            return
        if getattr(sys, "last_value", None) is not None:
            return  # gpucoll notifies the other ranks why
        try:
            self.end()
        except GpucollError as error:
            print(f"gpucoll: at the end of this process: {error}", file=sys.stderr)

    def set_timeline(self, timeline: Timeline | None) -> None:
        """Write another timeline from now on, or none."""
        before, self.timeline = self.timeline, timeline
        for engine in self.engines.values():
            engine.timeline = timeline
        if before is not None:
            before.close()

    # --- who is who -------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise unless `init` was called."""
        if self._service is None:
            raise ValueError(_NOT_INITIALIZED)

    @property
    def world(self) -> Communicator:
        """All ranks. Every rank makes the same calls on it, in the same order."""
        self.check()
        assert self._service is not None
        return self._service

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.world_size

    def _place(self) -> None:
        """Find out which ranks share a host."""
        service = self._service
        assert service is not None
        colours = service.all_gather_object(colour_of_host(service))
        hosts = sorted(set(colours))
        seen = dict.fromkeys(hosts, 0)
        self._places = []
        for colour in colours:
            self._places.append((hosts.index(colour), seen[colour]))
            seen[colour] += 1

    def local(self) -> tuple[int, int]:
        """Return this rank's number on its host, and how many ranks are there."""
        self.check()
        host, place = self._places[self.rank]
        return place, sum(1 for other, _ in self._places if other == host)

    def cross(self) -> tuple[int, int]:
        """Return this host's number among those with a rank of this local number, and theirs."""
        self.check()
        host, place = self._places[self.rank]
        hosts = sorted(other for other, its in self._places if its == place)
        return hosts.index(host), len(hosts)

    def is_homogeneous(self) -> bool:
        """Return whether every host has the same number of ranks."""
        self.check()
        hosts = [host for host, _ in self._places]
        return len({hosts.count(host) for host in hosts}) == 1

    # --- process sets -----------------------------------------------------------------------------

    def ranks_of(self, number: int) -> list[int]:
        """Return the ranks of a process set."""
        self.check()
        if number not in self.sets:
            raise ValueError("Process set does not exist or has not been registered.")
        return self.sets[number]

    def engine_of(self, number: int | None) -> Engine:
        """Return the engine of a process set that this rank belongs to.

        Raises
        ------
        ValueError
            Not initialized, no such set, or this rank is not in it.
        """
        engine = self.engines.get(number)  # type: ignore[arg-type]  # None is no key
        if engine is not None:
            return engine
        self.check()
        self.ranks_of(-1 if number is None else number)
        raise ValueError("Process is not part of provided process set.")

    def check_dynamic(self) -> None:
        """Raise unless process sets may be added and removed."""
        self.check()
        if not settings_of().dynamic_process_sets:
            raise ValueError(
                "Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow adding or removing process sets after "
                "initialization."
            )

    def add_set(self, ranks: Sequence[int]) -> int | None:
        """Give some ranks an engine, and return its number; None if they have one. Collective."""
        service = self.agree("add_process_set", list(ranks))
        if any(not 0 <= rank < self.size for rank in ranks) or not ranks:
            raise ValueError(
                f"a process set has ranks between 0 and {self.size - 1}; got {list(ranks)}"
            )
        if twice := [rank for rank in sorted(set(ranks)) if ranks.count(rank) > 1]:
            raise ValueError(f"Tried to register process set with duplicate rank: {twice[0]}")
        if list(ranks) in self.sets.values():
            return None
        number = next(n for n in range(len(self.sets) + 1) if n not in self.sets)
        comm = service.split(0 if self.rank in ranks else None)
        if comm is not None:
            self.engines[number] = Engine(comm, self._options, self.timeline)
        self.sets[number] = list(ranks)
        return number

    def remove_set(self, number: int) -> bool:
        """Remove a process set; return whether there was one. Collective."""
        self.agree("remove_process_set", number)
        if self.sets.pop(number, None) is None:
            return False
        if (engine := self.engines.pop(number, None)) is not None:
            engine.close()
        return True

    def agree(self, call: str, given: object) -> Communicator:
        """Raise on every rank unless all have passed the same to this call."""
        self.check()
        assert self._service is not None
        try:
            everyone = self._service.all_gather_object((call, given), timeout_s=WAIT_S)
        except GpucollError as error:
            raise HorovodInternalError(str(error)) from error
        if any(other != everyone[0] for other in everyone):
            told = "; ".join(f"rank {r}: {name}({it})" for r, (name, it) in enumerate(everyone))
            raise ValueError(f"every rank must give the same process sets; got {told}")
        return self._service


job = Job()
"""This process's; every front of Horovod's frameworks uses it."""
