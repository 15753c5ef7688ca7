"""A rank's GPU once it is connected: the backend, what issues its calls, and what watches them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpucoll.backends.gpu.flight import Departure, Flight
from gpucoll.backends.gpu.issuer import Issuer
from gpucoll.backends.gpu.signature import Signature, Signatures
from gpucoll.backends.gpu.watcher import Watcher
from gpucoll.backends.nccl import connecting
from gpucoll.backends.nccl.backend import NcclBackend
from gpucoll.backends.nccl.connection import Connection
from gpucoll.backends.nccl.launch import Launch, Place
from gpucoll.backends.protocol import MessageRequest, Request
from gpucoll.control.channel import ControlChannel
from gpucoll.control.enqueued import EnqueuedCalls
from gpucoll.control.group import HostGroup
from gpucoll.errors import ArgumentError, BackendUnavailableError, GpucollError


@dataclass
class Issue:
    """One call, ready to be put on a stream.

    Attributes
    ----------
    name : str
        What the user called.
    signatures : sequence of Signature
        What ranks compare of it (`Connected.signatures`); none for messages.
    launches : sequence of Launch
        What is enqueued: all of it at once.
    stream : int
        Where.
    keep : object
        What must live until it is done.
    is_own : bool
        Whether all of the memory is the user's: what a captured graph can use again.
    timeout_s : float, optional
        How long it may take from its start on.
    """

    name: str
    signatures: Sequence[Signature]
    launches: Sequence[Launch]
    stream: int
    keep: Any
    is_own: bool
    timeout_s: float | None


class Connected:
    """What exists from the first call on GPU arrays to the communicator's end.

    Parameters
    ----------
    group : HostGroup
        The ranks.
    calls : EnqueuedCalls
        Where calls are posted and compared.
    connection : Connection
        The vendor library's communicator.
    exits : bool
        Whether a failure that nobody asks for ends the process.
    """

    def __init__(
        self, group: HostGroup, calls: EnqueuedCalls, connection: Connection, exits: bool
    ) -> None:
        self._group = group
        self._calls = calls
        place = Place(group.rank, group.world_size)
        new_watch = partial(
            connecting.watch_of, group, calls, "a call of the vendor's library", None
        )
        self.backend = NcclBackend(connection, place, new_watch)
        self.device = connection.device
        self.issuer = Issuer(
            group, calls, connection.device, self.backend.failure, self.backend.abort
        )
        self._signatures = Signatures(calls, *place)
        self._watcher = Watcher(self.issuer, exits=exits)

    def launches(
        self, requests: Sequence[Request], messages: Sequence[MessageRequest]
    ) -> list[Launch]:
        """Return what a call's requests enqueue; ArgumentTypeError where the library cannot."""
        made = [self.backend.prepare(request) for request in requests]
        return [*made, self.backend.prepare_messages(messages)] if messages else made

    def signatures(self, requests: Sequence[Request]) -> list[Signature]:
        """Return what ranks compare of a call's requests."""
        return [self._signatures.of(request) for request in requests]

    def issue(self, issue: Issue) -> Flight:
        """Put one call on its stream, and return at once."""
        launches, stream = issue.launches, issue.stream
        if len(launches) == 1 and self.backend.outgrows_scratch(launches[0]):
            self._drain(issue)
        with self.issuer.lock, self.device:
            departure = self._departure(issue)
            if len(launches) == 1:
                self.backend.reserve(launches[0])
                enqueue = partial(self.backend.enqueue, launches[0], stream)
            else:
                enqueue = self._together([issue])
            return self.issuer.issue([departure], enqueue)[0]

    def _drain(self, issue: Issue) -> None:
        """Wait until earlier calls are done, before memory is given back for this one.

        The driver waits for them, too, but without a deadline: the watcher could not end what hangs
        there while this thread is in the driver and holds the lock.
        """
        with self.device:
            self._departure(issue)  # refuses what is captured: then nothing may be asked for
        self.issuer.synchronize()

    def issue_group(self, issues: Sequence[Issue]) -> list[Flight]:
        """Put several calls on their streams as one group of the library's."""
        with self.issuer.lock, self.device:
            enqueue = self._together(issues)
            return self.issuer.issue([self._departure(issue) for issue in issues], enqueue)

    def _together(self, issues: Sequence[Issue]) -> Any:
        for issue in issues:
            for launch in issue.launches:
                self.backend.check_groupable(launch, issue.name)
        pairs = [(launch, issue.stream) for issue in issues for launch in issue.launches]
        return partial(self.backend.enqueue_together, pairs)

    def _departure(self, issue: Issue) -> Departure:
        is_captured = self.device.is_capturing(issue.stream)
        if is_captured:
            for launch in issue.launches:
                self.backend.check_groupable(launch, issue.name)
            if not issue.is_own:
                raise ArgumentError(
                    f"{issue.name}: a captured graph uses the same memory at every replay: give "
                    "contiguous arrays, and out="
                )
            self.backend.connection.is_in_graphs = True
        limit_s = self._group.timeout_s if issue.timeout_s is None else issue.timeout_s
        return Departure(
            issue.signatures, issue.stream, issue.name, issue.keep, limit_s, is_captured
        )

    def split(
        self, channel: ControlChannel, color: int | None, key: int, timeout_s: float | None
    ) -> Connection | None:
        """Divide the library's communicator; every rank calls it, after its calls are done."""
        self.issuer.synchronize()
        watch = connecting.watch_of(self._group, self._calls, "splitting", timeout_s)
        made, error = None, ""
        try:
            with self.issuer.lock:
                made = self.backend.connection.split(color, key, watch)
        except BackendUnavailableError as problem:
            error = str(problem)
            self._calls.say_failed()
        connecting.agree(channel, self.backend.name, made, error, timeout_s)
        return made

    def close(self, limit_s: float) -> None:
        """Wait for all calls, let go of everything, raise what went wrong and nobody was told."""
        issuer = self.issuer
        if self._group.was_told:
            self.give_up()
            return
        try:
            if issuer.is_busy:  # else all is known to be well, whatever the others did since
                issuer.synchronize()
        except BaseException:
            self.give_up()
            raise
        self._watcher.stop()
        self.backend.close(limit_s)
        issuer.close()

    def note_abort(self) -> None:
        """Give up on the GPU what this rank itself has just given up."""
        self.issuer.look()
        self._group.was_told = True

    def give_up(self) -> None:
        """Let go of everything without waiting."""
        self._watcher.stop()
        with self.issuer.lock, contextlib.suppress(GpucollError):
            self.backend.abort()
            self.issuer.close()
