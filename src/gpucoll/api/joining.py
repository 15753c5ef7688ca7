"""`gpucoll.join`: a process becomes a rank of a communicator that is in use."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from gpucoll import config
from gpucoll.api.communicator import create
from gpucoll.api.growing import FAILED_MEETING, SAME, arrive, drop, handed, job_of, note
from gpucoll.api.parameters import parse
from gpucoll.backends.choice import Wish
from gpucoll.dependencies import check_dependencies
from gpucoll.group.growth import NewcomerWatch, Plan
from gpucoll.rendezvous.door_caller import Caller
from gpucoll.rendezvous.door_place import find_door
from gpucoll.rendezvous.held_signals import held_signals
from gpucoll.rendezvous.notices import tell_joined
from gpucoll.tracebacks import shorten_uncaught

if TYPE_CHECKING:
    from gpucoll.api.call_types import AnyDevice
    from gpucoll.api.communicator import Communicator
    from gpucoll.rendezvous.meeting_store import AnyStore

_GOING_OVER_S: Final = 1.0
"""How long to watch, after rank 0 was lost, whether the other old ranks leave."""


def join(
    *,
    meet: str | AnyStore | None = None,
    name: str | None = None,
    device: AnyDevice = None,
    timeout_s: float | None = None,
    on_async_error: str | None = None,
    bind: bool = False,
) -> Communicator:
    """Join a communicator that is in use, as one of its ranks; its ranks call `grow`.

    This process gets the next number, ``world_size - 1`` or less if others join with it. The
    communicator has the backend, the deadline and the other settings of the one that has grown.
    `Communicator.epoch` tells which growth it was, and ``len(comm.former_ranks)`` how many ranks
    were there before. The ranks hand their state over as they like, usually by
    ``comm.broadcast(..., root=0)`` or `broadcast_object`.

    Parameters
    ----------
    meet : str or store, optional
        Where the ranks call ``grow(meet=...)``: see `gpucoll.init`. Default: ``GPUCOLL_MEET``, or
        the launcher's meeting point; on one host the launcher's job, or ``GPUCOLL_JOB``.
    name : str, optional
        The `name` that the ranks give to `grow`.
    device, on_async_error, bind
        As for `gpucoll.init`.
    timeout_s : float, optional
        How long to wait until the ranks let this process in, in seconds. Default:
        ``GPUCOLL_TIMEOUT_S``, or 300.

    Raises
    ------
    RendezvousDeadlineError
        The ranks did not let this process in by then.
    RendezvousError
        It does not fit: it has another version of gpucoll, for example; or nothing says where.
    AuthenticationError
        It does not know the job's secret, or the ranks belong to another user.

    Notes
    -----
    If other newcomers fail on the way, or rank 0 is lost, this process waits on for the next
    `grow`. In a process that ``gpucoll-run --elastic`` has started again, `init` is this call.

    Examples
    --------
    >>> with gpucoll.join(meet="tcp://10.0.0.1:29500") as comm:
    ...     step, weights = comm.broadcast_object(None, root=0)
    """
    shorten_uncaught()
    check_dependencies()
    limit_s, exits, wish = parse("auto", device, False, timeout_s, on_async_error, None, None)
    is_launched = config.variable(config.JOIN) is not None
    wish = wish._replace(exits=is_launched if exits is None else exits)
    place = find_door(meet, name)
    from gpucoll.backends import precompile

    precompile.load(is_alone=False)
    with held_signals() as signals:
        caller = Caller(place, SAME, limit_s, signals)
        try:
            made = _let_in(caller, wish)
            tell_joined()
        finally:
            caller.close()
    try:
        arrive(made, made._group.timeout_s)
        if bind:
            made._group.bind_cpus()
    except BaseException:  # Ctrl-C: nobody else has it
        drop(made)
        raise
    return made


def _let_in(caller: Caller, wish: Wish) -> Communicator:
    """Answer rank 0 until it lets this process in; return the communicator."""
    made: Communicator | None = None
    said: dict[str, Any] = {}
    try:
        while True:
            message = caller.next_message()
            if "ask" in message:
                caller.say({"here": True})
                continue
            if made is not None and _is_in(caller, message, made, said):
                note(made, said["n_old"], said["epoch"], message.get("resumed_from"))
                return made
            drop(made)
            made = None
            if "plan" in message:
                said = message
                made = _meet_as_newcomer(caller, wish, said)
                if made is not None:
                    caller.say({"made": True})
    except BaseException:
        drop(made)
        raise


def _is_in(
    caller: Caller, message: dict[str, Any], made: Communicator, said: dict[str, Any]
) -> bool:
    """Return whether all old ranks have gone over to the new communicator.

    Rank 0 says so. If it was lost before that, the others show it: those that have not gone over
    close the new communicator at once. Where they have, it is broken because rank 0 is lost, and
    this process shrinks it with them.
    """
    if "lost" not in message:
        return "in" in message
    others = range(1, said["n_old"])
    stop = time.monotonic() + _GOING_OVER_S
    while time.monotonic() < stop:
        if any(made._group.has_closed(rank) for rank in others):
            return False
        caller.pause()
    return bool(others)


def _meet_as_newcomer(caller: Caller, wish: Wish, said: dict[str, Any]) -> Communicator | None:
    """Meet the ranks; return the communicator, or None where somebody else has failed."""
    plan, rank = Plan.of(said["plan"]), int(said["rank"])
    backend, keeps_order, mixed, schedule = said["wish"]
    wish = Wish(backend, wish.device, wish.exits, keeps_order, mixed, schedule)
    point = handed(plan, caller.credentials()) if plan.meet else None
    watch = NewcomerWatch(rank, plan.world_size, caller.has_news)
    job = job_of(plan, rank, point)
    try:
        made: Communicator = create(
            job, plan.limit_s, float(said["timeout_s"]), wish, watch, connects=False
        )
    except FAILED_MEETING as error:
        if not watch.has_begun:  # this process itself cannot meet anybody
            raise
        caller.last_failure = str(error)
        return None
    return made
