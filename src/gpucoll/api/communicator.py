"""The communicator: the object whose methods users call."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, Protocol

import numpy as np

from gpucoll import backends, config
from gpucoll.api.collectives import ArrayCollectives
from gpucoll.api.groups import Groups
from gpucoll.api.memory import Memory
from gpucoll.api.messages import Messages
from gpucoll.api.names_elsewhere import SaysNamesElsewhere
from gpucoll.api.objects import Objects
from gpucoll.api.parameters import parse
from gpucoll.api.plans import Plans
from gpucoll.arrays import torch_compiler
from gpucoll.backends.choice import GPU_BACKENDS, MPI, Choice, Seen, Wish, choose
from gpucoll.backends.discovery import look_for_gpus
from gpucoll.backends.protocol import HostBackend
from gpucoll.calls.begun_message import BegunMessage
from gpucoll.calls.collectives import Collectives
from gpucoll.calls.dispatch import Dispatch
from gpucoll.calls.gpu.runner import GpuRunner
from gpucoll.calls.objects import ObjectMover
from gpucoll.calls.plan import Plan
from gpucoll.calls.point_to_point import PointToPoint
from gpucoll.calls.runner import Runner
from gpucoll.calls.unwaited import end_all_unwaited
from gpucoll.calls.work import Work
from gpucoll.calls.work_queue import WorkQueue
from gpucoll.collectives import NO_ROOT, Collective
from gpucoll.errors import (
    AbortedError,
    ArgumentTypeError,
    BackendUnavailableError,
    DeadlineError,
    GpucollError,
    MismatchError,
    PeerLostError,
    StateError,
)
from gpucoll.finalizers import leave, run_all
from gpucoll.group.division import Division
from gpucoll.group.protocol import ENDING_S, Channel, Group
from gpucoll.rendezvous.held_signals import held_signals
from gpucoll.rendezvous.job import Job
from gpucoll.rendezvous.meeting import Watch
from gpucoll.tracebacks import shorten_uncaught
from gpucoll.wording import rank_of

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from gpucoll.api.call_types import AnyDevice
    from gpucoll.api.description import Description
    from gpucoll.backends.mpi.ranks import MpiRanks
    from gpucoll.calls.given import AnyResult, Unchecked
    from gpucoll.rendezvous.door import Door
    from gpucoll.rendezvous.meeting_store import AnyStore

_open: weakref.WeakSet[Communicator] = weakref.WeakSet()
_LOSSES = (PeerLostError, DeadlineError, AbortedError, MismatchError)
"""The errors after which `shrink` is useful."""


class Companion(Protocol):
    """What a front has made of a communicator, and ends with it."""

    def close(self, timeout_s: float) -> None:
        """End it, after what it still does."""

    def give_up(self) -> None:
        """End it without waiting for other ranks, if it has not ended."""


class Communicator(ArrayCollectives, Messages, Plans, Groups, Memory, Objects, SaysNamesElsewhere):
    """A group of ranks that call collectives together; made by `gpucoll.init`.

    Every rank makes the same calls in the same order, from one thread at a time; a second thread
    needs its own communicator (`duplicate`). Every wait has a deadline (`timeout_s`, 300 s unless
    set in `init`).

    Attributes
    ----------
    rank : int
        This process's number, 0 to ``world_size - 1``.
    world_size : int
        Number of ranks.
    epoch : int
        Number of calls of `shrink` and `grow` from the communicator of `init` to this one.
    resumed_from : int or None
        After `shrink` or `grow`: the last collective of the old communicator that all its ranks
        completed.
    former_ranks : tuple of int or None
        After `shrink`: for each rank, its rank in the old communicator. After `grow`: the old
        ranks, which keep their numbers; newcomers have the numbers from ``len(former_ranks)`` on.
    """

    def __init__(
        self, group: Group, channel: Channel, backend: HostBackend, choice: Choice, wish: Wish
    ) -> None:
        torch_compiler.tell_torch()
        self.epoch = 0
        self.resumed_from: int | None = None
        self.former_ranks: tuple[int, ...] | None = None
        self.rank = group.rank
        self.world_size = group.world_size
        self._group = group
        self._backend = backend
        self._choice = choice
        self._wish = wish
        self._door: Door | None = None
        """On rank 0, once `grow` was called: where newcomers wait."""
        self._n_growths = 0
        self._companions: list[Companion] = []
        """Communicators of fronts for this one's ranks, which end with it."""
        self._run_barrier = channel.run_barrier
        self._runner = runner = Runner(group, channel)
        self._queue = runner.queue
        self._queue.ends_process = wish.exits
        self._gpu = gpu = GpuRunner(runner, choice, wish)
        dispatch = Dispatch(choice)
        self._point_to_point = PointToPoint(group, backend, gpu, dispatch)
        self._collectives = Collectives(runner, backend, gpu, dispatch, _caller_of(self))
        self._objects = ObjectMover(runner, backend)
        self._bind(self._collectives)
        _open.add(self)
        # If this is dropped without close, pending calls continue, in a thread that keeps them.
        self._finalizer = weakref.finalize(self, _let_go, weakref.ref(self._queue))
        self._finalizer.atexit = False

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Wait until every rank has called it."""
        if timeout_s is None:
            if not (status := self._run_barrier()):
                return
            self._collectives.raise_status(status)
        barrier = self._runner.channel.barrier
        self._runner.run("barrier", barrier, timeout_s=timeout_s, lasting=None)

    # --- more communicators -----------------------------------------------------------------------

    def split(
        self, color: int | None, key: int = 0, *, timeout_s: float | None = None
    ) -> Communicator | None:
        """Divide the ranks into one communicator for each color.

        Parameters
        ----------
        color : int or None
            Ranks with the same color form a communicator. A rank with None joins none, and gets
            None.
        key : int
            Ranks are numbered by key, then by their rank here.
        timeout_s : float, optional
            Deadline for all ranks to arrive, in seconds.

        Notes
        -----
        A rank that is lost, interrupted or late in this call breaks this communicator, as in any
        call. If there is no memory for the new one, all ranks are told, and this communicator stays
        usable.
        """
        return self._divide(Collective.SPLIT, color, key, timeout_s)

    def duplicate(self, *, timeout_s: float | None = None) -> Communicator:
        """Return a communicator of the same ranks, for another thread or for a library."""
        made = self._divide(Collective.DUPLICATE, 0, self.rank, timeout_s)
        assert made is not None
        return made

    def _divide(
        self, collective: Collective, color: int | None, key: int, timeout_s: float | None
    ) -> Communicator | None:
        for name, number in (("color", color), ("key", key)):
            is_none = name == "color" and number is None
            if not is_none and not isinstance(number, int | np.integer | np.bool_):
                either = "an int or None" if name == "color" else "an int"
                raise ArgumentTypeError(f"split: {name} must be {either}; got {number!r}")
        mine = pickle.dumps((color, key, self.rank, os.urandom(16).hex()))
        parts = self._runner.exchange_bytes(mine, collective, NO_ROOT, timeout_s)
        with Division(self._group, collective.spelled) as division:
            return self._come_together(parts, collective, color, timeout_s, division)

    def _come_together(
        self,
        parts: list[bytes],
        collective: Collective,
        color: int | None,
        timeout_s: float | None,
        division: Division,
    ) -> Communicator | None:
        """Meet the ranks of one color. `parts` has the color, key and rank of every rank."""
        everyone = [pickle.loads(part) for part in parts]
        colors = sorted({item[0] for item in everyone if item[0] is not None})
        ranks = sorted((item for item in everyone if item[0] == color), key=lambda item: item[1:3])
        division.ranks = [item[2] for item in ranks]
        place = division.ranks.index(self.rank)
        job = self._group.meeting_of(
            [] if color is None else division.ranks,
            ranks[0][3],
            division.call,
            lambda data: self._runner.exchange_bytes(data, collective, NO_ROOT, timeout_s),
        )
        # NCCL splits a communicator in a call of all its ranks, whatever their color.
        gpu_color = None if color is None else colors.index(color)
        connection = self._gpu.split(gpu_color, place, timeout_s)
        if color is None:
            return None
        division.has_begun = True  # the others wait for this rank from here on
        limit = self._group.timeout_s if timeout_s is None else timeout_s
        wish = self._wish._replace(device=None)  # GPUs that are connected are handed on
        over_mpi = self._over_mpi(division.ranks, limit)
        timeout = self._group.timeout_s
        try:
            made = create(job, limit, timeout, wish, division, connects=False, over_mpi=over_mpi)
        except BaseException:
            if connection is not None:
                connection.abort()
            raise
        made._gpu.adopt(connection, division.ranks)
        made.epoch = self.epoch
        return made

    def _over_mpi(self, ranks: list[int], timeout_s: float) -> Callable[[], MpiRanks] | None:
        """Return a function that makes these ranks a communicator of MPI's; None without MPI."""
        whole = self._group.over_mpi
        return None if whole is None else lambda: whole.part(ranks, timeout_s)

    @staticmethod
    def from_mpi(
        communicator: Intracomm,
        *,
        backend: str = "auto",
        device: AnyDevice = None,
        mixed: bool = False,
        timeout_s: float | None = None,
        on_async_error: str | None = None,
        deterministic: str | None = None,
        direct_schedule: str | None = None,
        bind: bool = False,
    ) -> Communicator:
        """Return a communicator of the ranks of an mpi4py communicator, which stays usable.

        Collective over these ranks: each calls it, any number of times, in order with its MPI
        collectives. The ranks learn over MPI which rank is on which host, and where to meet: they
        need no launcher's environment, no meeting point and no secret.

        Parameters
        ----------
        communicator : mpi4py.MPI.Intracomm
            Any intracommunicator: ``MPI.COMM_WORLD``, one of Split or Create_group, a Cartesian
            one. The ranks keep their numbers.
        backend : str
            As for `gpucoll.init`. With ``"auto"``, host arrays go through shared memory if all
            ranks are on one host, and through MPI (``"mpi"``) if they are on several; MPI is the
            way to InfiniBand, Slingshot and EFA. ``"cpu"`` uses gpucoll's own links instead.
        device, mixed, timeout_s, on_async_error, deterministic, direct_schedule, bind
            As for `gpucoll.init`.

        Raises
        ------
        ArgumentTypeError
            The argument is not a communicator of mpi4py, or is an intercommunicator.
        StateError
            MPI is not initialised, or is finalised.
        RendezvousDeadlineError
            A rank of the communicator did not call this in time.
        BackendUnavailableError
            The backend cannot be used; for ``"mpi"`` also if MPI was initialised with less than
            ``MPI_THREAD_MULTIPLE``, or the process has loaded two MPIs.

        Notes
        -----
        Cost: one `Idup` of the communicator, three small all_gathers, and the cost of
        `gpucoll.init`. A communicator that uses MPI ends with it: close it before
        ``MPI.Finalize``, otherwise every later call on it raises StateError. Other communicators
        may outlive MPI.

        Examples
        --------
        >>> from mpi4py import MPI
        >>> comm = gpucoll.Communicator.from_mpi(MPI.COMM_WORLD)
        """
        from gpucoll.api.over_mpi import from_communicator

        shorten_uncaught()
        asked = parse(
            backend, device, mixed, timeout_s, on_async_error, deterministic, direct_schedule
        )
        made: Communicator = from_communicator(communicator, *asked, create)
        if bind:
            made._group.bind_cpus()
        return made

    # --- after losses -----------------------------------------------------------------------------

    @property
    def completed(self) -> int:
        """The number of the last collective on host arrays that this rank has completed.

        Errors show the same number (``#7``); a call has the same number on every rank.
        """
        self._group.check_alive()
        return self._group.completed

    def shrink(self, *, timeout_s: float | None = None) -> Communicator:
        """Return a communicator of the surviving ranks, after PeerLostError, DeadlineError, ...

        Collective among the surviving ranks: all must call it, though not at the same time. They
        agree on the survivors, keep their order (`former_ranks`), and close this communicator. The
        new one has the same backend, deadline and GPU. Pending asynchronous calls and messages end
        with the error that broke this communicator.

        Parameters
        ----------
        timeout_s : float, optional
            How long the others wait for a rank that is alive but has not called this, before they
            continue without it, in seconds; making the new communicator may take as long again.
            Default: the communicator's deadline.

        Raises
        ------
        ShrinkError
            Fewer than half of the ranks are left here, or exactly half without the lowest rank, or
            the others have continued without this rank.

        Notes
        -----
        Ranks that are lost during the call are left out, too. On a whole communicator it returns
        one of all ranks. This is also the way to continue after a MismatchError that has broken the
        communicator, because not every rank raised it in the call that differed: `resumed_from`
        gives the call from which to continue.

        Examples
        --------
        >>> try:
        ...     total = comm.all_reduce(x)
        ... except (gpucoll.PeerLostError, gpucoll.DeadlineError, gpucoll.AbortedError):
        ...     comm = comm.shrink()
        """
        from gpucoll.group.survivors import come_together

        config.check_timeout_s(timeout_s)
        group = self._group
        group.check_alive()
        self._check_idle("shrink")
        limit = group.timeout_s if timeout_s is None else timeout_s
        self._end_pending(limit)
        wish = self._gpu.wish_again()
        if wish.backend == MPI:
            wish = wish._replace(backend="auto")  # MPI's communicators cannot lose ranks

        def make(job: Job, watch: Watch) -> Communicator:
            return create(job, limit, group.timeout_s, wish, watch, connects=False)

        who = rank_of(self.rank, self.world_size)
        try:
            made, survivors = come_together(group.agreement(limit), make, who)
        except BaseException:
            group.abort()  # a rank that has not called this may be waiting in another call
            raise
        made.epoch = self.epoch + 1
        made.resumed_from = survivors.resumed_from
        made.former_ranks = survivors.ranks
        self._give_up()
        return made

    def grow(
        self,
        *,
        meet: str | AnyStore | None = None,
        name: str | None = None,
        at_most: int | None = None,
        wait_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> Communicator:
        """Return a communicator of these ranks and of processes that wait in `gpucoll.join`.

        Collective, as every call: it takes place on all ranks between the same two collectives. The
        ranks keep their numbers, and newcomers get the next ones. If newcomers have come, this
        communicator is closed, and the new one has the same backend, deadline and settings. If
        nobody has come, this communicator itself is returned.

        Parameters
        ----------
        meet : str or store, optional
            Where newcomers wait: see `gpucoll.init`; ``"tcp://HOST:PORT"`` names the host of this
            communicator's rank 0. Default: ``GPUCOLL_MEET``, or the launcher's meeting point; on
            one host the launcher's job, or ``GPUCOLL_JOB``.
        name : str, optional
            Tells this communicator apart from others of the job that grow.
        at_most : int, optional
            How many newcomers are let in; others wait for the next call. Default: all that are
            here. Rank 0's value counts.
        wait_s : float
            How long to wait until `at_most` newcomers are here, or one if that is not given, in
            seconds. Those that are here by then are let in. Rank 0 waits as long as its value says,
            and the others wait for rank 0 as long as theirs say: give the same on all ranks.
        timeout_s : float, optional
            How long the meeting with the newcomers may take, in seconds. Default: the
            communicator's deadline.

        Raises
        ------
        RendezvousError
            Rank 0 cannot listen there, or a rank does not know the secret, or there is no memory
            for the new communicator, or the newcomers failed again and again. All ranks raise it,
            and this communicator stays usable.
        MismatchError
            Messages have not been received; they would be lost. This communicator stays usable.
        StateError
            The ranks are those of an MPI, which adds none; or this is inside `group`.
        PeerLostError, DeadlineError, AbortedError
            A rank of this communicator is lost, late or has given up, as in any call.

        Notes
        -----
        A newcomer that dies or stops on the way is left out, and costs the others at most
        `timeout_s`. Newcomers prove the job's secret as in `init`. From the first call on, rank 0
        listens at the place until the communicator is closed: no other meeting can use the port of
        a ``tcp://`` place meanwhile. Cost: one small all_gather if nobody waits; otherwise a
        meeting, as in `init`. A stranger that connects and says nothing costs half a second once.
        Arrays of `empty` stay valid; allocate new ones from the new communicator. Pending
        asynchronous calls end first; messages have 5 seconds to end.

        Examples
        --------
        >>> while step < STEPS:
        ...     try:
        ...         if comm is not (comm := comm.grow()):
        ...             step, weights = comm.broadcast_object((step, weights))
        ...         ...
        ...     except (gpucoll.PeerLostError, gpucoll.DeadlineError, gpucoll.AbortedError):
        ...         comm = comm.shrink()
        """
        from gpucoll.api.growing import grow

        return grow(self, create, meet, name, at_most, wait_s, timeout_s)

    def _retire(self, timeout_s: float) -> None:
        """Close this communicator, whose ranks all go on in another one."""
        self._end_pending(timeout_s)
        with contextlib.suppress(*_LOSSES):
            self._gpu.close(timeout_s)
        self._give_up()

    def _check_idle(self, call: str) -> None:
        if self._gpu.is_running or (self._group.is_running and not self._queue.is_busy):
            raise StateError(
                f"rank {self.rank} of {self.world_size} is in a call on this communicator in "
                f"another thread: {call} it after that call, or abort it"
            )

    def _end_pending(self, timeout_s: float) -> None:
        """Wait for pending calls and messages, which end soon if the communicator is broken."""
        messages = self._point_to_point.queue
        messages.stop_watching()
        is_broken = self._group.is_aborted or self._group.failure is not None
        limit = min(timeout_s, ENDING_S) if is_broken else timeout_s
        with contextlib.suppress(*_LOSSES):
            messages.finish(limit)
        with contextlib.suppress(*_LOSSES):
            self._queue.stop(limit)

    # --- description ------------------------------------------------------------------------------

    def describe(self) -> Description:
        """Return what was chosen and why, and what is guaranteed. It prints as a table."""
        from gpucoll.api.description import Description

        return Description.of(self._group, self._backend, self._choice, self._gpu.describe())

    # --- the end ----------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._group.is_closed

    def check(self) -> None:
        """Raise a pending failure: of an asynchronous call, or of a broken communicator.

        Waits for calls on GPU arrays; when it returns, they have succeeded. Does not wait for calls
        on host arrays: a blocking one has raised its own failure, and one with ``async_op=True``
        that has failed is reported here.

        Raises
        ------
        MismatchError, DeadlineError, PeerLostError, BackendError
            The failure; see each error.
        """
        self._queue.raise_unseen()
        self._point_to_point.queue.raise_unseen()
        self._group.check_open()
        self._group.raise_if_aborted()
        self._gpu.check()

    def close(self, *, timeout_s: float | None = None) -> None:
        """Wait for asynchronous calls, raise failures never inspected, release all resources.

        Not collective: ranks may close at different times. A rank that still needs this one gets a
        PeerLostError. Closing twice does nothing. Arrays made by `empty` stay valid.

        Parameters
        ----------
        timeout_s : float, optional
            Deadline for all these calls together, in seconds. Default: the communicator's deadline.

        Raises
        ------
        DeadlineError
            An asynchronous call or message had not ended by then, and was given up on all ranks.
        MismatchError
            This rank never received messages that were sent to it, or a rank that has closed never
            received messages of this one.
        StateError
            Another thread is in a blocking call, and nothing was done. After `abort`, close waits
            until that call has ended.
        GpucollError, or another exception of a call
            The failure of an asynchronous call that was never inspected. A failure that another
            call has raised already, and an interrupt that the program has handled, are not raised
            again.

        Notes
        -----
        Whatever is raised, except StateError, the communicator is closed and nothing of it is left:
        no thread, shared memory, descriptor or mapping. After the deadline, this takes about 20 ms
        more, in which the calls that were given up end. A thread that does not return, because a
        user's callback or the GPU's driver hangs, is abandoned after seconds.
        """
        config.check_timeout_s(timeout_s)
        if self._group.is_closed or self._group.is_forked:
            return
        limit = self._group.timeout_s if timeout_s is None else timeout_s
        until = time.monotonic() + min(limit, threading.TIMEOUT_MAX)
        messages = self._point_to_point.queue
        try:
            messages.stop_watching()
            self._wait_where_aborted()
            self._check_idle("close")
        except StateError:
            raise
        except BaseException:  # Ctrl-C
            self._give_up()
            raise
        try:
            for companion in self._companions:
                companion.close(_left_s(until))
            messages.finish(_left_s(until))
            self._queue.stop(_left_s(until))
            self._gpu.close(_left_s(until))
            self._queue.raise_unseen()
            messages.raise_unseen()
            self._raise_unreceived()
        finally:
            self._give_up()

    def _wait_where_aborted(self) -> None:
        """After an abort, wait a moment for a call in another thread, which ends by itself."""
        until = time.monotonic() + ENDING_S
        while self._group.is_aborted and time.monotonic() < until:
            if not self._group.is_running and not self._gpu.is_running:
                return
            time.sleep(0.001)

    def _give_up(self) -> None:
        """Release all resources without waiting for other ranks."""
        steps = (
            lambda: _open.discard(self),
            self._close_door,
            *(companion.give_up for companion in self._companions),
            self._gpu.give_up,
            self._finalizer.detach,  # an interrupt in the finalizer would be lost
            self._queue.end,
            self._point_to_point.queue.end,
            self._group.close,
            self._queue.forget,
        )
        with held_signals():  # an interrupt in the middle would leave some resources behind
            run_all(*steps)

    def _close_door(self) -> None:
        door, self._door = self._door, None
        if door is not None and not self._group.is_forked:
            door.close()

    def abort(self) -> None:
        """Give up the communicator: every rank raises AbortedError, now or at its next call."""
        if not self._group.is_closed:
            self._group.abort()
            self._gpu.note_abort()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        if kind is None:
            self.close()
            return
        if error is not None:
            self._group.note_exception(error)
        is_pending = self._queue.is_busy or self._point_to_point.queue.n_pending
        is_busy = is_pending or self._gpu.is_busy or self._gpu.is_running or self._group.is_running
        if is_busy and not self._group.is_forked:
            self.abort()  # nobody will wait for the calls that are still running
        with contextlib.suppress(GpucollError):  # the first error is the one to see
            self.close()

    def __repr__(self) -> str:
        state = " closed" if self.is_closed else ""
        return f"<gpucoll.Communicator rank {self.rank} of {self.world_size}{state}>"

    def __reduce__(self) -> NoReturn:
        raise ArgumentTypeError("a communicator belongs to its process and cannot be pickled")


def create(
    job: Job,
    meet_timeout_s: float,
    timeout_s: float,
    wish: Wish,
    watch: Watch | None = None,
    *,
    connects: bool = True,
    over_mpi: Callable[[], MpiRanks] | None = None,
) -> Communicator:
    """Meet the ranks of `job` and return their communicator.

    `connects` says whether to connect the GPUs that the user asked for; a communicator that is
    split hands on its own. `watch` reports ranks that can never arrive. `over_mpi` returns these
    ranks as MPI knows them (`gpucoll.backends.mpi.ranks.MpiRanks`); every rank calls it if arrays
    go through MPI.
    """
    made: Communicator | None = None
    try:
        with held_signals():
            made = _meet(job, meet_timeout_s, timeout_s, wish, watch, over_mpi)
        asked_for = _asked_of_gpus(wish) if connects else ""
        if asked_for and not made._choice.gpu.backend:
            remedy = (
                "" if wish.backend in GPU_BACKENDS else ". Without device=, host arrays still work"
            )
            text = f"{asked_for} is not available: {made._choice.gpu.reason}{remedy}"
            raise BackendUnavailableError(text)
        if asked_for or (connects and wish.mixed):
            made._gpu.connect(None, meet_timeout_s)
        return made
    except BaseException:
        if made is not None:
            made._give_up()
        raise


def _asked_of_gpus(wish: Wish) -> str:
    """Return the part of a wish that needs GPUs, as errors name it; empty if there is none."""
    if wish.backend in GPU_BACKENDS:
        return f"backend {wish.backend!r}"
    return "" if wish.device is None else f"device={wish.device}"


def _meet(
    job: Job,
    meet_timeout_s: float,
    timeout_s: float,
    wish: Wish,
    watch: Watch | None,
    over_mpi: Callable[[], MpiRanks] | None,
) -> Communicator:
    from gpucoll.backends.cpu.host import tuning
    from gpucoll.group.joining import Policy, join

    facts = {"gpu": look_for_gpus()}
    same = {
        tuning.WISH: wish.backend,
        tuning.MIXED: wish.mixed,
        "deterministic": "order" if wish.keeps_order else None,
        "direct_schedule": wish.schedule,
    }
    policy = Policy(tuning.tune, tuning.waiting)
    met = join(job, policy, meet_timeout_s, timeout_s, facts, same, watch)
    try:
        seen = [Seen(*said["gpu"]) for said in met.introductions]
        takes_mpi = over_mpi is not None and met.spans_hosts
        choice = choose(wish.backend, seen, mixed=wish.mixed, takes_mpi=takes_mpi)
        # A host backend is needed even without host arrays: for objects and for what GPUs agree on.
        backend = choice.host.backend or "cpu"
        met.group.keeps_order = wish.keeps_order
        if backends.BACKENDS[backend].enqueues:  # mixed=True: host arrays take the GPUs' path
            backend = "cpu"
        module = backends.load(backend, spans_hosts=met.spans_hosts)
        given = (over_mpi,) if backend == MPI else ()  # the backend stores it in the group
        host: HostBackend = module.create(met.group, *given)
        return Communicator(met.group, met.channel, host, choice, wish)
    except BaseException:
        met.group.close()
        raise


def _caller_of(communicator: Communicator) -> Callable[..., AnyResult]:
    """Return a function that calls a method by its name, without keeping the communicator alive."""
    alive = weakref.ref(communicator)

    def call_again(name: str, *arguments: Unchecked, **given: Unchecked) -> AnyResult:
        return getattr(alive(), name)(*arguments, **given)

    return call_again


def _left_s(until: float) -> float:
    return max(until - time.monotonic(), 0.0)


def _let_go(queue: weakref.ref[WorkQueue]) -> None:
    if (alive := queue()) is not None:
        leave(alive.let_go)


def _close_all() -> None:
    # The error that ended the program, if none caught it; at a prompt, last_value is an old error.
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    exit_code = 0
    if error is None:
        with contextlib.suppress(KeyboardInterrupt):  # an interrupt ends the wait
            exit_code = end_all_unwaited(config.grace_s())
    for communicator in list(_open):
        if error is not None:
            communicator._group.note_exception(error)
        communicator._give_up()
    # Stop the progress thread last, while the memory that it reads still exists.
    if (progress := sys.modules.get("gpucoll.group.host.progress")) is not None:
        progress.thread().stop()
    if exit_code:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or full
            sys.stdout.flush()
        os._exit(exit_code)  # nothing else changes the code at this point


atexit.register(_close_all)
torch_compiler.keep_out_of(Communicator, BegunMessage, Plan, Work)
