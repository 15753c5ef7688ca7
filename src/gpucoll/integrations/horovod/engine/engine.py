"""The engine of one process set: requests in, results out."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpucoll import ArgumentError, ArgumentTypeError, GpucollError
from gpucoll.integrations.horovod.engine import checks
from gpucoll.integrations.horovod.engine.checks import Described
from gpucoll.integrations.horovod.engine.driver import Driver
from gpucoll.integrations.horovod.engine.exchange import Exchange
from gpucoll.integrations.horovod.engine.execute import batches, execute
from gpucoll.integrations.horovod.engine.forms import Form, Forms
from gpucoll.integrations.horovod.engine.joined import absent
from gpucoll.integrations.horovod.engine.request import Kind, Request
from gpucoll.integrations.horovod.engine.table import Ready, Table
from gpucoll.integrations.horovod.exceptions import HorovodInternalError

if TYPE_CHECKING:
    from gpucoll import Communicator
    from gpucoll.integrations.horovod.timeline import Timeline

__all__ = ["SHUT_DOWN", "Engine", "Options"]

_log = logging.getLogger("gpucoll.horovod")
_LONGEST_PAUSE = 2
"""Pauses between cycles that bring nothing grow up to so many times the cycle time."""


@dataclass(frozen=True)
class Options:
    """How an engine works."""

    cycle_time_s: float = 0.001
    """How long the driver thread leaves the program to wait itself, and between idle cycles."""
    fusion_bytes: int = 128 << 20
    """How much one fused call takes at most."""
    cache_capacity: int = 8192
    """How many digests of names and signatures are remembered."""


class Engine:
    """Matches the requests of the ranks of one process set by name, and executes them.

    No rank coordinates: in a cycle all ranks tell each other what is new (`Exchange`), and each
    computes the same list of what is ready, in the same order. Whoever waits for a request drives
    the cycles; if nobody does, a driver thread.

    Parameters
    ----------
    comm : Communicator
        Of the set's ranks; the engine has it for itself, and closes it.
    options : Options
    timeline : Timeline, optional
        Where to write what happens.
    """

    def __init__(
        self, comm: Communicator, options: Options, timeline: Timeline | None = None
    ) -> None:
        self.comm = comm
        self.timeline = timeline
        self._options = options
        self._control = comm.duplicate()
        self._table = Table(comm.world_size)
        self._exchange = Exchange(self._control, self._table)
        self._forms = Forms(comm.world_size, options.cache_capacity)
        self.n_submitted = 0
        """About how many requests were submitted: threads do not wait for each other to count."""
        self._pending: dict[int, Request] = {}
        self._new: deque[Form] = deque()
        self._join: Request | None = None
        self._driving, self._ending = threading.Lock(), threading.Lock()
        self._cycling = 0
        """The thread that is in a cycle."""
        self._news = threading.Event()
        self._n_idle = 0
        self._failure: BaseException | None = None
        self._numbers: defaultdict[str, itertools.count[int]] = defaultdict(
            lambda: itertools.count(1)
        )
        self._driver = Driver(self, options.cycle_time_s)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is pending."""
        return not self._pending and self._join is None

    def submit(self, request: Request, at_once: bool = False) -> None:
        """Queue a request; a driver thread drives it if nobody waits.

        Parameters
        ----------
        at_once : bool
            Whether nobody of this thread's program will wait for it by `wait`: then the driver
            thread does not leave it the cycle time to do so.

        Raises
        ------
        ValueError
            A request of this name is pending.
        HorovodInternalError
            The engine has failed: a rank was lost, for example.
        """
        self._enqueue(request)
        self._driver.wake(at_once)

    def hurry(self) -> None:
        """Let the driver thread do what is pending at once: the program waits, but not here."""
        self._driver.wake(at_once=True)

    def run(self, request: Request) -> None:
        """Submit and wait: cheaper than one after the other, since no thread is woken."""
        self._enqueue(request)
        self.wait(request)

    def wait(self, request: Request) -> None:
        """Return when the request is done; raise its error.

        Raises
        ------
        HorovodInternalError
            The ranks asked for different things under this name, or a rank was lost.
        RuntimeError
            Called by what a request calls when it is `finished`: nobody would drive.
        """
        while not request.is_done:
            if self._cycling == threading.get_ident():
                raise RuntimeError(f"{request.name!r} is waited for where another one is finished")
            with self._driving:
                if not request.is_done:
                    self.cycle()
        request.library.received(request)
        if request.error is not None:
            raise request.error

    def unnamed(self, kind: str) -> str:
        """Return the next name for a request without one, such as ``allreduce.noname.1``."""
        return f"{kind}.noname.{next(self._numbers[kind])}"

    def drive(self, patiently: bool = True) -> None:
        """Run one cycle if something is pending: for the driver.

        Parameters
        ----------
        patiently : bool
            Whether to wait for another thread that is in a cycle. Otherwise nothing is done then.
        """
        if not self._driving.acquire(blocking=patiently):
            return
        try:
            if not self.is_idle:
                self.cycle()
        finally:
            self._driving.release()

    def _enqueue(self, request: Request) -> None:
        if self._failure is not None:
            raise _internal(self._failure)
        request.since = time.monotonic()
        self.n_submitted += 1
        if request.kind is Kind.JOIN:
            if self._join is not None:
                raise ValueError(checks.DUPLICATE)
            self._join = request
        else:
            form = request.form
            if form is None:
                form = request.form = self._forms.of(request)
            if self._pending.setdefault(form.key, request) is not request:
                raise ValueError(checks.DUPLICATE)
            request.library.submitted(request)
            if self.timeline is not None:
                self.timeline.submitted(request)
            self._new.append(form)
        if self._n_idle:
            self._news.set()
        self._fail_late()

    def _fail_late(self) -> None:
        """Fail what was submitted in the moment in which the engine failed."""
        if self._failure is not None:
            self._fail(self._failure)

    def cycle(self) -> None:
        """Exchange what is new and execute what has become ready; never raises a call's failure."""
        self._fail_late()
        if self._failure is not None:
            return
        if self._n_idle:
            pause = min(self._n_idle, _LONGEST_PAUSE) * self._options.cycle_time_s
            self._news.wait(pause)
            self._news.clear()
        self._cycling = threading.get_ident()
        try:
            ready: list[Ready] = []
            if self.timeline is not None:
                self.timeline.cycle()
            any_news = self._exchange.run(self._new, self._join is not None, ready)
            self._n_idle = 0 if any_news else self._n_idle + 1
            if ready:
                self._do(ready)
            if self._table.joined and self._table.have_all_joined():
                self._end_join()
        except BaseException as error:
            if not isinstance(error, GpucollError):
                self.abort()
            self._fail(error)
            if not isinstance(error, Exception):  # Ctrl-C
                raise
        finally:
            self._cycling = 0

    def _do(self, ready: list[Ready]) -> None:
        if self._exchange.have_agreed or not self._need_details(ready):
            requests = [self._pending[entry.key] for entry in ready]
        else:
            requests = self._checked(ready)
        for batch in batches(requests, self._options.fusion_bytes):
            self._execute(batch)

    def _need_details(self, ready: list[Ready]) -> bool:
        return self._table.joined != 0 or any(entry.differs for entry in ready)

    def _execute(self, batch: list[Request]) -> None:
        if self.timeline is not None:
            self.timeline.begin(batch)
        error: BaseException | None = None
        try:
            execute(self.comm, batch)
        except (ArgumentError, ArgumentTypeError) as raised:  # on every rank
            error = raised
        except Exception as raised:
            self._failure = error = raised
            if not isinstance(raised, GpucollError):  # of this rank alone: the others wait for it
                self.abort()
        for request in batch:
            self._finish(request, error)
        if self._failure is not None:
            raise self._failure

    def _checked(self, ready: list[Ready]) -> list[Request]:
        """Tell all ranks the details, and return what can be executed; this rank's zeros, too."""
        mine = {
            entry.key: Described.of(self._pending[entry.key])
            for entry in ready
            if entry.key in self._pending
        }
        everyone = self._control.all_gather_object(mine)
        requests = []
        for entry in ready:
            asked = {
                rank: told[entry.key] for rank, told in enumerate(everyone) if entry.key in told
            }
            first = next(iter(asked.values()))
            text = checks.mismatch(asked) if entry.differs else None
            if text is None and len(asked) < self.comm.world_size:
                text = checks.not_with_join(first.kind)
            own = self._pending.get(entry.key)
            if text is None:
                requests.append(own if own is not None else self._zeros(first))
            elif own is not None:
                self._finish(own, HorovodInternalError(text))
        return requests

    def _zeros(self, described: Described) -> Request:
        """Return what this rank, which has joined, contributes to a request of others."""
        request = absent(described)
        request.form = self._forms.of(request)
        return request

    def _end_join(self) -> None:
        request, self._join = self._join, None
        self._numbers.clear()  # ranks that joined earlier have given fewer names
        if request is not None:
            request.last_joined = self._table.last_joined
            self._finish(request, None)

    def _finish(self, request: Request, error: BaseException | None) -> None:
        """Note that a request is done, once: several threads may notice a failure."""
        with self._ending:
            if is_first := not request.is_done:
                if error is not None:
                    request.error = _internal(error)
                if self.timeline is not None and request.form is not None:
                    self.timeline.end(request)
                request.is_done = True
            if request.form is not None and self._pending.get(request.form.key) is request:
                del self._pending[request.form.key]
        if is_first and request.finished is not None:
            try:
                request.finished(request)
            except Exception:  # on this rank alone: the ranks go on
                _log.exception("what was to be done after %r has failed", request.name)

    def _fail(self, error: BaseException) -> None:
        """Give an error to all that is pending, now and later."""
        if self._failure is None:
            self._failure = error
        error = self._failure
        for request in [*self._pending.values()]:
            self._finish(request, error)
        if (join := self._join) is not None:
            self._join = None
            self._finish(join, error)

    def pending_for_s(self) -> float:
        """Return the age of the oldest request that is pending, 0 if none is."""
        try:
            oldest = next(iter(self._pending.values()), self._join)
        except RuntimeError:  # another thread has just changed it
            return 0.0
        return 0.0 if oldest is None else time.monotonic() - oldest.since

    def pending(self) -> list[tuple[str, float]]:
        """Return what is pending: the names, and when they were submitted (`time.monotonic`)."""
        return [(request.name, request.since) for request in [*self._pending.values()]]

    def fail(self, error: BaseException) -> None:
        """Let all that is pending fail, now and later, with this error; `abort` what runs after."""
        if self._failure is None:
            self._failure = error
        self._driver.wake(at_once=True)

    def close(self) -> None:
        """End the driver thread and close the communicators; what is pending fails."""
        if self._failure is None:
            self._failure = GpucollError(SHUT_DOWN)
            if not self.is_idle:
                self.abort()
        self._driver.stop()
        self._fail(self._failure)
        for comm in (self._control, self.comm):
            comm.close()

    def abort(self) -> None:
        """Make every rank's calls raise, also those that run."""
        for comm in (self._control, self.comm):
            comm.abort()


SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt "
    "to allreduce, allgather or broadcast a tensor after one of the ranks finished execution."
)


def _internal(error: BaseException) -> BaseException:
    """Return the error of a request, one of its own: tracebacks grow where it is raised."""
    if isinstance(error, HorovodInternalError):
        return HorovodInternalError(str(error))
    made = HorovodInternalError(str(error) or type(error).__name__)
    made.__cause__ = error
    return made
