"""The communicator: what users call."""

from __future__ import annotations

import atexit
import contextlib
import pickle
import secrets
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from gpucoll.api.collectives import ArrayCollectives
from gpucoll.api.description import Description
from gpucoll.api.groups import Grouping
from gpucoll.api.memory import Allocating
from gpucoll.api.messages import Messages
from gpucoll.api.objects import ObjectCollectives
from gpucoll.api.plans import Planning
from gpucoll.arrays import torch_compiler
from gpucoll.backends.choice import KINDS, Choice, Seen, Wish, choose
from gpucoll.backends.discovery import look_for_gpus
from gpucoll.calls.gpu.calls import GpuCalls
from gpucoll.calls.gpu.work import GpuWork
from gpucoll.calls.messages import MessageQueue
from gpucoll.calls.plan import Plan
from gpucoll.calls.preparation import NOT_IN_GROUPS
from gpucoll.calls.work import Work, WorkQueue
from gpucoll.config import check_timeout_s
from gpucoll.errors import ArgumentTypeError, GpucollError, StateError
from gpucoll.group.host.channel import ControlChannel
from gpucoll.group.host.group import HostGroup
from gpucoll.group.host.members import join
from gpucoll.rendezvous.job import Job
from gpucoll.types import Collective

_open: weakref.WeakSet[Communicator] = weakref.WeakSet()


class Communicator(ArrayCollectives, Messages, Planning, Grouping, Allocating, ObjectCollectives):
    """A group of ranks that call collectives together; made by `gpucoll.init`.

    Every rank makes the same calls in the same order. One thread at a time; for a second thread,
    `duplicate`. Every wait has a deadline (`timeout_s`, 300 s unless `init` said otherwise).

    Attributes
    ----------
    rank : int
        This process's number, 0 to ``world_size - 1``.
    world_size : int
        Number of ranks.
    """

    def __init__(self, group: HostGroup, backend: Any, choice: Choice, wish: Wish) -> None:
        torch_compiler.tell_torch()
        self.rank = group.rank
        self.world_size = group.world_size
        self._group = group
        self._backend = backend
        self._choice = choice
        self._wish = wish
        self._host_refusal = "" if choice.host.backend else choice.host.reason
        self._channel = ControlChannel(group)
        self._run_barrier = self._channel.run_barrier
        self._queue = WorkQueue(group.set_pending)
        self._entering = threading.Lock()
        self._grouped = None
        self._message_queue = MessageQueue(
            backend.messages, self._queue, self._run, group.check_open
        )
        self._gpu = GpuCalls(group, self._channel, choice, wish, self._run)
        self._bind_entries()
        _open.add(self)
        # One that is dropped without close: the queue's thread would keep everything but this.
        weakref.finalize(self, _let_go, weakref.ref(self._queue)).atexit = False

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank has called it."""
        if timeout_s is None:
            if not (status := self._run_barrier()):
                return
            self._raise_status(status)
        self._run("barrier", self._channel.barrier, lambda: None, timeout_s=timeout_s, lasting=None)

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
        mine = pickle.dumps((color, key, self.rank, secrets.token_hex(16)))
        parts = self._exchange_bytes(mine, collective, -1, timeout_s)
        everyone = [pickle.loads(part) for part in parts]
        colors = sorted({item[0] for item in everyone if item[0] is not None})
        ranks = sorted((item for item in everyone if item[0] == color), key=lambda item: item[1:3])
        place = [item[2] for item in ranks].index(self.rank)
        # NCCL divides what is connected together with all ranks, whatever their color.
        gpu_color = None if color is None else colors.index(color)
        connection = self._gpu.split(gpu_color, place, timeout_s)
        if color is None:
            return None
        job = Job(place, len(ranks), ranks[0][3], collective.spelled)
        limit = self._group.timeout_s if timeout_s is None else timeout_s
        wish = self._wish._replace(device=None)  # what is connected is handed on
        try:
            made = create(job, limit, self._group.timeout_s, wish, connects=False)
        except BaseException:
            if connection is not None:
                connection.abort()
            raise
        made._gpu.adopt(connection)
        return made

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
        if not self._queue.is_busy:
            self._queue.raise_unseen()
        self._group.check_open()
        self._group.raise_if_aborted()
        self._gpu.check()

    def close(self) -> None:
        """Wait for asynchronous calls, raise a failure nobody has seen, let go of everything.

        Not collective: ranks may close at different times. A rank that still needs this one gets a
        PeerLostError. Closing twice does nothing. Arrays of `empty` stay valid.

        Raises
        ------
        MismatchError
            Messages to this rank were never received, or a rank that has closed never received
            those of this one. The communicator is closed nevertheless.
        """
        if self._group.is_closed or self._group.is_forked:
            return
        if self._gpu.is_running or (self._group.is_running and not self._queue.is_busy):
            raise StateError(
                f"rank {self.rank} of {self.world_size} is in a call on this communicator in "
                "another thread: close it after that, or abort it"
            )
        try:
            self._queue.stop(self._group.timeout_s)
            self._gpu.close()
            self._queue.raise_unseen()
            self._raise_unreceived()
        finally:
            _open.discard(self)
            self._gpu.give_up()
            self._group.close()

    def _give_up(self) -> None:
        """Let go of everything without waiting for anybody."""
        _open.discard(self)
        self._gpu.give_up()
        self._group.close()

    def abort(self) -> None:
        """Give the communicator up: every rank raises AbortedError, now or at its next call."""
        if not self._group.is_closed:
            self._group.abort()
            self._gpu.note_abort()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        if (self._queue.is_busy or self._gpu.is_busy) and not self._group.is_forked:
            self.abort()  # nobody will wait for what is still going on
        with contextlib.suppress(GpucollError):  # the first error is the one to see
            self.close()

    def __repr__(self) -> str:
        state = " closed" if self.is_closed else ""
        return f"<gpucoll.Communicator rank {self.rank} of {self.world_size}{state}>"

    def __reduce__(self) -> Any:
        raise ArgumentTypeError("a communicator belongs to its process and cannot be pickled")

    # --- how calls run ----------------------------------------------------------------------------

    def _run(
        self,
        name: str,
        task: Callable[[float | None], None],
        finish: Callable[[], Any],
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
        lasting: Any = NOT_IN_GROUPS,
        on_work: Callable[[Work[Any]], None] | None = None,
    ) -> Any:
        """Run a task in its turn, then `finish`; or queue it, or keep it for the end of the group.

        `lasting` is what a call inside a group returns: the array that is filled at its end.
        """
        check_timeout_s(timeout_s)
        if self._grouped is not None:
            return self._keep_for_group(name, task, finish, async_op, timeout_s, lasting)
        if not self._entering.acquire(blocking=False):
            raise StateError(
                f"another thread of rank {self.rank} of {self.world_size} is in a call on this "
                "communicator: one thread at a time, or one communicator per thread (duplicate)"
            )
        try:
            if not self._queue.is_busy:
                self._queue.raise_unseen()
                if not async_op:
                    task(timeout_s)
                    return finish()
            self._group.check_open()

            def queued() -> Any:
                if not async_op:  # what was pending has ended: as if it had before this call
                    self._queue.raise_unseen()
                task(timeout_s)
                return finish()

            work = self._queue.submit(queued, name, on_work)
            return work if async_op else work.wait()
        finally:
            self._entering.release()

    def _exchange_bytes(
        self, data: bytes, collective: Collective, root: int, timeout_s: float | None
    ) -> list[bytes]:
        parts: list[bytes] = []

        def exchange(timeout_s: float | None) -> None:
            parts.extend(self._channel.all_gather_bytes(data, collective, root, timeout_s))

        self._run(collective.spelled, exchange, lambda: None, timeout_s=timeout_s)
        return parts


def create(
    job: Job, meet_timeout_s: float, timeout_s: float, wish: Wish, *, connects: bool = True
) -> Communicator:
    """Meet the ranks of `job` and return their communicator.

    `connects` says whether to connect the GPUs that the user asked for; one that is divided hands
    on its own.
    """
    from gpucoll.backends.cpu.host import backend, tuning

    facts = {"gpu": look_for_gpus()}
    same = {tuning.WISH: wish.backend}
    members = join(job, tuning.tune, meet_timeout_s, facts, same)
    group = HostGroup(members, timeout_s, tuning.waiting(members.introductions))
    seen = [Seen(*introduction["gpu"]) for introduction in members.introductions]
    made = Communicator(group, backend.create(group), choose(wish.backend, seen), wish)
    asks = wish.device is not None or wish.backend in KINDS
    if connects and asks and made._choice.gpu.backend:
        try:
            made._gpu.connect(None, meet_timeout_s)
        except BaseException:
            made._give_up()
            raise
    return made


def _let_go(queue: weakref.ref[WorkQueue]) -> None:
    if (alive := queue()) is not None:
        alive.let_go()


def _close_all() -> None:
    for communicator in list(_open):
        communicator._give_up()


atexit.register(_close_all)
torch_compiler.keep_out_of(Communicator, GpuWork, Plan, Work)
