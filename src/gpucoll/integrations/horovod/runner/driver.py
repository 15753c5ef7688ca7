"""An elastic job: ranks are started where slots appear, and leave where they disappear."""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from gpucoll import LaunchError, config
from gpucoll.integrations.horovod.elastic.news import (
    NEWS,
    PLACE,
    HostUpdateResult,
    News,
    write_news,
)
from gpucoll.integrations.horovod.runner.discovery import Discovery
from gpucoll.integrations.horovod.runner.ranks import LocalJob, Slot, assigned, places
from gpucoll.integrations.horovod.settings import settings_of, variable_of
from gpucoll.launcher.arguments import Options
from gpucoll.launcher.job import joining_environment
from gpucoll.launcher.rank_process import RankCommand, RankEnd, label_of

__all__ = ["DISCOVER_HOSTS_FREQUENCY_SECS", "RESET_LIMIT_EXCEEDED_MESSAGE", "ElasticJob"]

DISCOVER_HOSTS_FREQUENCY_SECS = 1.0
RESET_LIMIT_EXCEEDED_MESSAGE = (
    "Horovod was shutdown because number of resets during elastic job exceeded limit: {}"
)
_SOON_S = 5.0
_LONGEST_PAUSE_S = 60.0


class ElasticJob(LocalJob):
    """The ranks of an elastic job on this host, which its discovery may call by several names.

    Parameters
    ----------
    args, options, environment
        Those of `LocalJob`.
    discovery : Discovery
    hosts : mapping
        What it has found for the beginning.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        options: Options,
        environment: Mapping[str, str],
        discovery: Discovery,
        hosts: Mapping[str, int],
    ) -> None:
        slots = assigned(hosts, args.max_num_proc)
        self._folder_of_news = tempfile.TemporaryDirectory(prefix="gpucoll-horovod-")
        self._path = str(Path(self._folder_of_news.name) / "news")
        own = {NEWS: self._path, variable_of("ELASTIC"): "1"}
        super().__init__(args, options, slots, {**environment, **own})
        self._least: int = args.min_num_proc or args.num_proc
        self._most: int | None = args.max_num_proc
        self._reset_limit: int | None = args.reset_limit
        self._cooldown: tuple[float, float] | None = args.cooldown_range
        self._patience_s = settings_of({**os.environ, **environment}).elastic_timeout_s
        self._discovery = discovery
        self._hosts = dict(hosts)
        self._places = {slot: place for place, slot in enumerate(slots)}
        """Every slot that ever had a process."""
        self._running = dict(enumerate(slots))
        """The processes that are ranks, or are to be."""
        self._joined = set(self._running)
        self._leaving: set[int] = set()
        self._barred: dict[str, int] = {}
        """Hosts that are left out for now, and how often they were."""
        self._is_out: set[str] = set()
        self._past: dict[int, RankEnd] = {}
        """How the last process of a place ended."""
        self._resting: set[Slot] = set()
        """Slots that get another process after a pause."""
        self._started_s = dict.fromkeys(self._running, time.monotonic())
        self._n_soon: dict[int, int] = {}
        self._n_resets = 0
        self.failure = ""
        """Why the job has failed, if it is not a rank that says so."""
        self._news = News(least=self._least)

    def execute(self) -> int:
        """Run the job and return the exit code."""
        write_news(self._path, self._news)
        try:
            return super().execute()
        finally:
            self._discovery.end()
            self._folder_of_news.cleanup()

    def first_commands(self) -> list[RankCommand]:
        """Return the command of each rank's first process; begin to look for hosts."""
        commands = super().first_commands()
        self._ask_later()
        return [
            command._replace(environment={**command.environment, PLACE: str(place)})
            for place, command in enumerate(commands)
        ]

    def conclude(self) -> int:
        """Report how the job ended, and return the exit code."""
        code = super().conclude()
        if self.failure:
            self.relay.note(self.failure)
        return code or bool(self.failure)

    # --- hosts ------------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return bool(self.failures or self.finished or self.stopped_by or self.failure)

    def _ask_later(self) -> None:
        if self._discovery.script is not None:
            loop = self.rank_set.loop
            loop.call_later("discover", DISCOVER_HOSTS_FREQUENCY_SECS, self._ask)

    def _ask(self) -> None:
        if not self._is_over:
            self._discovery.ask(self.rank_set.loop, self._found)

    def _found(self, found: dict[str, int] | LaunchError) -> None:
        if isinstance(found, LaunchError):
            self.relay.note(str(found))
        elif found != self._hosts:
            known = {host: found[host] for host in self._hosts if host in found}
            self._hosts = {**known, **found}  # ranks on hosts that were there keep their order
            self._follow()
        self._ask_later()

    def _wanted(self) -> list[Slot]:
        """Return the slots that there are to be ranks in; those with ranks come first."""
        hosts = {host: n for host, n in self._hosts.items() if host not in self._is_out}
        slots = assigned(hosts)
        return sorted(slots, key=lambda slot: slot not in self._running.values())[: self._most]

    def _follow(self) -> None:
        """Make the job what the hosts allow."""
        if self._is_over:
            return
        wanted = self._wanted()
        taken = {*self._running.values(), *self._resting}
        taken.update(slot for slot, place in self._places.items() if place in self._leaving)
        gone = [place for place, slot in self._running.items() if slot not in wanted]
        fresh = [slot for slot in wanted if slot not in taken]
        if len(wanted) < self._least or not (gone or fresh):
            return  # the ranks that there are go on until there are enough slots
        if len(gone) == len(self._running):
            self._fail_job("No hosts from previous set remaining, unable to broadcast state.")
            return
        if gone and not self._joined.difference(gone, self._leaving):
            return  # not before others have the state: `joined`
        if not self._count_reset():
            return
        for place in gone:
            del self._running[place]
            self._leaving.add(place)
            self.rank_set.loop.call_later(
                ("leave", place), self._patience_s, partial(self._hurry, place)
            )
        update = HostUpdateResult.removed * bool(gone) | HostUpdateResult.added * bool(fresh)
        size = len(self._running) + len(fresh)
        self._news = News(self._news.serial + 1, update, size, self._least, sorted(self._leaving))
        write_news(self._path, self._news)
        for slot in fresh:
            self._start(slot, size)

    def _hurry(self, place: int) -> None:
        if place in self._leaving:
            self.rank_set.send_to(place, signal.SIGTERM)

    def _count_reset(self) -> bool:
        self._n_resets += 1
        if self._reset_limit is None or self._n_resets <= self._reset_limit:
            return True
        self._fail_job(RESET_LIMIT_EXCEEDED_MESSAGE.format(self._reset_limit))
        return False

    def _fail_job(self, why: str) -> None:
        self.failure = why
        self.rank_set.terminate()

    # --- processes --------------------------------------------------------------------------------

    def _start(self, slot: Slot, size: int) -> None:
        """Start a process in a slot that has none, of a job that is to have so many ranks."""
        place = self._places.setdefault(slot, len(self._places))
        self._running[place] = slot
        self._started_s[place] = time.monotonic()
        former = self._past.pop(place, None)
        if former is not None:
            self.rank_set.start_again(former, lambda: self._command(place, former.attempt + 1), 0.0)
            return
        self.relay.admit(place)
        self.rank_set.add(place, size, self._command(place, 1))

    def _command(self, place: int, attempt: int) -> RankCommand:
        """Return the command of a process that joins the job."""
        slots = list(self._running.values())
        its = places(slots)[slots.index(self._running[place])]
        environment = {
            **joining_environment(self.commands[0].environment),
            **its.variables(),
            config.LOCAL_RANK: str(place),
            PLACE: str(place),
        }
        self.relay.rename(place, label_of(place, attempt))
        return RankCommand(
            arguments=self.options.command,
            environment=environment,
            stdin=subprocess.DEVNULL,
            attempt=attempt,
        )

    def joined(self, rank: int) -> None:
        """Count the process in a place as a rank."""
        self._joined.add(rank)
        self._follow()

    def ended(self, end: RankEnd) -> None:
        """Go on without a process, or end the job."""
        place = end.rank
        slot = self._running.pop(place, None)
        was_rank = place in self._joined
        self._joined.discard(place)
        if place in self._leaving:
            self._leaving.discard(place)
            self._past[place] = end
            self._follow()
        elif not end.failed or self._is_over or end.by_launcher or slot is None:
            if end.failed and not was_rank and not self.stopped_by:
                self.unjoined.append(end)
            else:
                self.take(end)
            self.rank_set.start_none_again()
        elif not self._joined:
            self.fail(end)
        else:
            self._past[place] = end
            self._lost(end, slot, was_rank)
        if self._is_over and not self._joined:
            self.rank_set.terminate()

    def _lost(self, end: RankEnd, slot: Slot, was_rank: bool) -> None:
        """Leave a failed process's host out if others are enough; else start another process."""
        rest = sum(n for host, n in self._hosts.items() if host not in {*self._is_out, slot.host})
        if rest >= self._least:
            self.relay.note(f"{end}; {slot.host} is left out")
            self._bar(slot.host)
            self._follow()
            return
        if was_rank and not self._count_reset():
            return
        is_soon = time.monotonic() - self._started_s[end.rank] < _SOON_S
        n_soon = self._n_soon[end.rank] = self._n_soon.get(end.rank, 0) + 1 if is_soon else 0
        pause_s = min(2.0 ** (n_soon - 2), _LONGEST_PAUSE_S) if n_soon > 1 else 0.0
        self.relay.note(f"{end}; its slot on {slot.host} gets another process in {pause_s:g} s")
        self._resting.add(slot)
        self._news = self._news._replace(size=0)  # the others do not wait for it
        write_news(self._path, self._news)
        self.rank_set.loop.call_later(("again", slot), pause_s, lambda: self._again(slot))

    def _again(self, slot: Slot) -> None:
        self._resting.discard(slot)
        if not self._is_over and slot in self._wanted():
            self._start(slot, len(self._running) + 1)

    def _bar(self, host: str) -> None:
        """Leave a host out, for ever or for a while that grows each time."""
        self._is_out.add(host)
        if self._cooldown is None:
            return
        shortest, longest = self._cooldown
        times = self._barred[host] = self._barred.get(host, 0) + 1
        pause_s = min(longest, shortest * 2**times + random.uniform(0, shortest))

        def take_back() -> None:
            self._is_out.discard(host)
            self._follow()

        self.rank_set.loop.call_later(("bar", host), pause_s, take_back)
