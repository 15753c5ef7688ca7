"""The communicator: what users call."""

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
from typing import Any

import numpy as np

from gpucoll import backends, config
from gpucoll.api.collectives import ArrayCollectives
from gpucoll.api.description import Description
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
from gpucoll.calls.gpu.work import GpuWork
from gpucoll.calls.objects import ObjectMover
from gpucoll.calls.plan import Plan
from gpucoll.calls.point_to_point import PointToPoint
from gpucoll.calls.runner import Runner
from gpucoll.calls.unwaited import end_all_unwaited
from gpucoll.calls.work import Work
from gpucoll.calls.work_queue import WorkQueue
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
from gpucoll.group.survivors import come_together
from gpucoll.rendezvous.held_signals import held_signals
from gpucoll.rendezvous.job import Job
from gpucoll.rendezvous.meeting import Watch
from gpucoll.tracebacks import shorten_uncaught
from gpucoll.types import NO_ROOT, Collective
from gpucoll.wording import rank_of

_open: weakref.WeakSet[Communicator] = weakref.WeakSet()
_LOSSES = (PeerLostError, DeadlineError, AbortedError, MismatchError)
"""What `shrink` is for."""


class Communicator(ArrayCollectives, Messages, Plans, Groups, Memory, Objects, SaysNamesElsewhere):
    """A group of ranks that call collectives together; made by `gpucoll.init`.

    Every rank makes the same calls in the same order. One thread at a time; for a second thread,
    `duplicate`. Every wait has a deadline (`timeout_s`, 300 s unless `init` said otherwise).

    Attributes
    ----------
    rank : int
        This process's number, 0 to ``world_size - 1``.
    world_size : int
        Number of ranks.
    epoch : int
        How often `shrink` has been called, from the communicator of `init` to this one.
    resumed_from : int or None
        The last collective of the one that was shrunk which all ranks here have completed.
    former_ranks : tuple of int or None
        By rank here, the rank there.
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
        # One that is dropped without close: what is pending goes on, by a thread that keeps it.
        self._finalizer = weakref.finalize(self, _let_go, weakref.ref(self._queue))
        self._finalizer.atexit = False

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank has called it."""
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
        """Divide the ranks into communicators of one color each.

        Parameters
        ----------
        color : int or None
            Ranks of one color come together; None takes part in none and gets None.
        key : int
            Ranks are numbered by key, then by their rank here.
        timeout_s : float, optional
            Deadline for all ranks to come, in seconds.

        Notes
        -----
        A rank that is lost, interrupted or late in here breaks this communicator, as in any call;
        where all ranks are told that there is no memory for the new one, this one works on.
        """
        return self._divide(Collective.SPLIT, color, key, timeout_s)

    def duplicate(self, *, timeout_s: float | None = None) -> Communicator:
        """Return a communicator of the same ranks: for another thread, or a library of its own."""
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
        """Meet the ranks of one color; `parts` say who they are."""
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
        # NCCL divides what is connected together with all ranks, whatever their color.
        gpu_color = None if color is None else colors.index(color)
        connection = self._gpu.split(gpu_color, place, timeout_s)
        if color is None:
            return None
        division.has_begun = True  # the others wait for this rank from here on
        limit = self._group.timeout_s if timeout_s is None else timeout_s
        wish = self._wish._replace(device=None)  # what is connected is handed on
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

    def _over_mpi(self, ranks: list[int], timeout_s: float) -> Callable[[], Any] | None:
        """Return what makes some of these ranks one of MPI's communicators, where they go so."""
        whole = self._group.over_mpi
        return None if whole is None else lambda: whole.part(ranks, timeout_s)

    @staticmethod
    def from_mpi(
        communicator: Any,
        *,
        backend: str = "auto",
        device: Any = None,
        mixed: bool = False,
        timeout_s: float | None = None,
        on_async_error: str | None = None,
        deterministic: str | None = None,
        bind: bool = False,
    ) -> Communicator:
        """Return a communicator of the ranks of one of mpi4py's, which stays as usable as before.

        Collective over those: each rank of it calls this, as often as wanted, in the order of its
        MPI collectives. They learn over MPI who is on which host, and where to meet: no launcher's
        environment, no meeting point and no secret are needed.

        Parameters
        ----------
        communicator : mpi4py.MPI.Intracomm
            Any: ``MPI.COMM_WORLD``, one of Split or Create_group, a Cartesian one. The ranks keep
            their numbers.
        backend : str
            As for `gpucoll.init`. With ``"auto"`` host arrays go through shared memory where all
            ranks are on one host, through MPI (``"mpi"``) where they are on several, which is the
            way to InfiniBand, Slingshot and EFA; ``"cpu"`` takes gpucoll's own links instead.
        device, mixed, timeout_s, on_async_error, deterministic, bind
            As for `gpucoll.init`.

        Raises
        ------
        ArgumentTypeError
            It is no communicator of mpi4py, or an intercommunicator.
        StateError
            MPI is not initialised, or finalised.
        RendezvousDeadlineError
            Some rank of it did not call this in time.
        BackendUnavailableError
            The backend cannot serve; for ``"mpi"`` also where MPI was initialised with less than
            ``MPI_THREAD_MULTIPLE``, or the process has loaded two MPIs.

        Notes
        -----
        One `Idup` of the communicator, three small all_gathers, and what `gpucoll.init` costs. What
        goes through MPI ends with it: close such a communicator before ``MPI.Finalize``, or every
        later call on it is a StateError. The others may outlive MPI.

        Examples
        --------
        >>> from mpi4py import MPI
        >>> comm = gpucoll.Communicator.from_mpi(MPI.COMM_WORLD)
        """
        from gpucoll.api.over_mpi import from_communicator

        shorten_uncaught()
        asked = parse(backend, device, mixed, timeout_s, on_async_error, deterministic)
        made: Communicator = from_communicator(communicator, *asked, create)
        if bind:
            made._group.bind_cpus()
        return made

    # --- after losses -----------------------------------------------------------------------------

    @property
    def completed(self) -> int:
        """The number of the last collective on host arrays that this rank has completed.

        As errors count them; the same call has the same number on every rank.
        """
        self._group.check_alive()
        return self._group.completed

    def shrink(self, *, timeout_s: float | None = None) -> Communicator:
        """Return a communicator of the ranks that are left, after PeerLostError, DeadlineError, ...

        Collective among those: each calls it, at whatever time. They agree on who is left, are
        numbered in their old order (`former_ranks`), and this communicator is closed. Its backend,
        deadline and GPU carry over. Asynchronous calls and messages that are pending end with the
        error that has broken it.

        Parameters
        ----------
        timeout_s : float, optional
            How long a rank that lives has for calling this, in seconds, before the others go on
            without it; the same again for making the new one. Default: the communicator's.

        Raises
        ------
        ShrinkError
            Fewer than half of the ranks are left here, or half without the lowest of them, or the
            others have gone on without this rank.

        Notes
        -----
        What is lost on the way is left out, too. On a communicator that is whole it returns one of
        all ranks. So it does after a MismatchError that has broken the communicator, because not
        every rank raised it in the call that differed: `resumed_from` says from where to go on.

        Examples
        --------
        >>> try:
        ...     total = comm.all_reduce(x)
        ... except (gpucoll.PeerLostError, gpucoll.DeadlineError, gpucoll.AbortedError):
        ...     comm = comm.shrink()
        """
        config.check_timeout_s(timeout_s)
        group = self._group
        group.check_alive()
        self._check_idle("shrink")
        limit = group.timeout_s if timeout_s is None else timeout_s
        self._end_pending(limit)
        wish = self._gpu.wish_again()
        if wish.backend == MPI:
            wish = wish._replace(backend="auto")  # no communicator of MPI's loses ranks

        def make(job: Job, watch: Watch) -> Communicator:
            return create(job, limit, group.timeout_s, wish, watch, connects=False)

        who = rank_of(self.rank, self.world_size)
        try:
            made, survivors = come_together(group.agreement(limit), make, who)
        except BaseException:
            group.abort()  # whoever has not called this may wait for it in another call
            raise
        made.epoch = self.epoch + 1
        made.resumed_from = survivors.resumed_from
        made.former_ranks = survivors.ranks
        self._give_up()
        return made

    def _check_idle(self, call: str) -> None:
        if self._gpu.is_running or (self._group.is_running and not self._queue.is_busy):
            raise StateError(
                f"rank {self.rank} of {self.world_size} is in a call on this communicator in "
                f"another thread: {call} it after that, or abort it"
            )

    def _end_pending(self, timeout_s: float) -> None:
        """Wait for what is pending, which ends soon where the communicator is broken."""
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
        """Return what was chosen and why, and what is promised; prints as a table."""
        return Description.of(self._group, self._backend, self._choice, self._gpu.describe())

    # --- the end ----------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._group.is_closed

    def check(self) -> None:
        """Raise what is wrong: a failure nobody has seen, a broken communicator.

        Waits until calls on GPU arrays are done: when it returns, they have succeeded. Does not
        wait for calls on host arrays: every blocking one has said so itself; after those with
        ``async_op=True`` this is the way to ask.

        Raises
        ------
        MismatchError, DeadlineError, PeerLostError, BackendError
            What went wrong; see there.
        """
        self._queue.raise_unseen()
        self._point_to_point.queue.raise_unseen()
        self._group.check_open()
        self._group.raise_if_aborted()
        self._gpu.check()

    def close(self, *, timeout_s: float | None = None) -> None:
        """Wait for asynchronous calls, raise a failure nobody has seen, let go of everything.

        Not collective: ranks may close at different times. A rank that still needs this one gets a
        PeerLostError. Closing twice does nothing. Arrays of `empty` stay valid.

        Parameters
        ----------
        timeout_s : float, optional
            How long to wait for all of those together, in seconds. Default: the communicator's
            deadline.

        Raises
        ------
        DeadlineError
            An asynchronous call or message had not ended then, and was given up on all ranks.
        MismatchError
            Messages to this rank were never received, or a rank that has closed never received
            those of this one.
        StateError
            Another thread is in a blocking call. Nothing has happened; after `abort` this waits
            until that call has ended.
        GpucollError, or what else a call has raised
            A failure of an asynchronous call that nobody has asked for. One that another call has
            raised already, and an interrupt that the program has handled, are not raised again.

        Notes
        -----
        But for StateError the communicator is closed whatever is raised, and nothing of it is left:
        no thread, shared memory, descriptor or mapping. After the deadline this takes some 20 ms
        more, for calls that are given up to end; a thread that does not come back, since a user's
        callback hangs or the GPU's driver does, is left to itself after seconds.
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
            messages.finish(_left_s(until))
            self._queue.stop(_left_s(until))
            self._gpu.close(_left_s(until))
            self._queue.raise_unseen()
            messages.raise_unseen()
            self._raise_unreceived()
        finally:
            self._give_up()

    def _wait_where_aborted(self) -> None:
        """Let a call in another thread end, which has been given up: it does in a moment."""
        until = time.monotonic() + ENDING_S
        while self._group.is_aborted and time.monotonic() < until:
            if not self._group.is_running and not self._gpu.is_running:
                return
            time.sleep(0.001)

    def _give_up(self) -> None:
        """Let go of everything without waiting for anybody."""
        steps = (
            lambda: _open.discard(self),
            self._gpu.give_up,
            self._finalizer.detach,  # it may be interrupted, and would swallow that
            self._queue.end,
            self._point_to_point.queue.end,
            self._group.close,
            self._queue.forget,
        )
        with held_signals():  # an interrupt in the middle would leave some of it
            run_all(*steps)

    def abort(self) -> None:
        """Give the communicator up: every rank raises AbortedError, now or at its next call."""
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
            self.abort()  # nobody will wait for what is still going on
        with contextlib.suppress(GpucollError):  # the first error is the one to see
            self.close()

    def __repr__(self) -> str:
        state = " closed" if self.is_closed else ""
        return f"<gpucoll.Communicator rank {self.rank} of {self.world_size}{state}>"

    def __reduce__(self) -> Any:
        raise ArgumentTypeError("a communicator belongs to its process and cannot be pickled")


def create(
    job: Job,
    meet_timeout_s: float,
    timeout_s: float,
    wish: Wish,
    watch: Watch | None = None,
    *,
    connects: bool = True,
    over_mpi: Callable[[], Any] | None = None,
) -> Communicator:
    """Meet the ranks of `job` and return their communicator.

    `connects` says whether to connect the GPUs that the user asked for; one that is divided hands
    on its own. `watch` says which ranks can never come. `over_mpi` returns these ranks as MPI knows
    them (`gpucoll.backends.mpi.ranks.MpiRanks`); each calls it, where arrays are to go that way.
    """
    made: Communicator | None = None
    try:
        with held_signals():
            made = _meet(job, meet_timeout_s, timeout_s, wish, watch, over_mpi)
        asked_for = _asked_of_gpus(wish) if connects else ""
        if asked_for and not made._choice.gpu.backend:
            remedy = (
                "" if wish.backend in GPU_BACKENDS else ". Without device= host arrays still go"
            )
            text = f"{asked_for} cannot be had: {made._choice.gpu.reason}{remedy}"
            raise BackendUnavailableError(text)
        if asked_for or (connects and wish.mixed):
            made._gpu.connect(None, meet_timeout_s)
        return made
    except BaseException:
        if made is not None:
            made._give_up()
        raise


def _asked_of_gpus(wish: Wish) -> str:
    """Return what of a wish needs GPUs, as errors call it; empty where nothing does."""
    if wish.backend in GPU_BACKENDS:
        return f"backend {wish.backend!r}"
    return "" if wish.device is None else f"device={wish.device}"


def _meet(
    job: Job,
    meet_timeout_s: float,
    timeout_s: float,
    wish: Wish,
    watch: Watch | None,
    over_mpi: Callable[[], Any] | None,
) -> Communicator:
    from gpucoll.backends.cpu.host import tuning
    from gpucoll.group.joining import Policy, join

    facts = {"gpu": look_for_gpus()}
    same = {
        tuning.WISH: wish.backend,
        tuning.MIXED: wish.mixed,
        "deterministic": "order" if wish.keeps_order else None,
    }
    policy = Policy(tuning.tune, tuning.waiting)
    met = join(job, policy, meet_timeout_s, timeout_s, facts, same, watch)
    try:
        seen = [Seen(*said["gpu"]) for said in met.introductions]
        takes_mpi = over_mpi is not None and met.spans_hosts
        choice = choose(wish.backend, seen, mixed=wish.mixed, takes_mpi=takes_mpi)
        # Where no host arrays are moved, too: objects and what GPUs agree on go the same way.
        backend = choice.host.backend or "cpu"
        met.group.keeps_order = wish.keeps_order
        if backends.BACKENDS[backend].enqueues:  # mixed=True: host arrays go as GPU arrays do
            backend = "cpu"
        module = backends.load(backend, spans_hosts=met.spans_hosts)
        given = (over_mpi,) if backend == MPI else ()  # which notes them in the group
        host: HostBackend = module.create(met.group, *given)
        return Communicator(met.group, met.channel, host, choice, wish)
    except BaseException:
        met.group.close()
        raise


def _caller_of(communicator: Communicator) -> Callable[..., Any]:
    """Return what calls a communicator's method by its name, and does not keep it alive."""
    alive = weakref.ref(communicator)

    def call_again(name: str, *arguments: Any, **given: Any) -> Any:
        return getattr(alive(), name)(*arguments, **given)

    return call_again


def _left_s(until: float) -> float:
    return max(until - time.monotonic(), 0.0)


def _let_go(queue: weakref.ref[WorkQueue]) -> None:
    if (alive := queue()) is not None:
        leave(alive.let_go)


def _close_all() -> None:
    # What ended the program, where nobody caught it; at a prompt, what was wrong some time ago.
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    exit_code = 0
    if error is None:
        with contextlib.suppress(KeyboardInterrupt):  # then without waiting
            exit_code = end_all_unwaited(config.grace_s())
    for communicator in list(_open):
        if error is not None:
            communicator._group.note_exception(error)
        communicator._give_up()
    # Last, while the memory that it looks at is still there.
    if (progress := sys.modules.get("gpucoll.group.host.progress")) is not None:
        progress.thread().stop()
    if exit_code:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or full
            sys.stdout.flush()
        os._exit(exit_code)  # nothing else changes the code at this point


atexit.register(_close_all)
torch_compiler.keep_out_of(Communicator, GpuWork, BegunMessage, Plan, Work)
