"""`Communicator.grow`: ranks let newcomers in while they use their communicator."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gpucoll import config
from gpucoll.collectives import NO_ROOT, Collective
from gpucoll.errors import (
    AbortedError,
    ArgumentError,
    ArgumentTypeError,
    AuthenticationError,
    DeadlineError,
    GpucollError,
    MismatchError,
    PeerLostError,
    RendezvousError,
    StateError,
    UsageError,
)
from gpucoll.group.growth import CALL, GrowthWatch, Plan, Vote, check_ready, give_up_growth, plan_of
from gpucoll.group.host.joining import check_descriptors
from gpucoll.group.in_one_piece import give_up
from gpucoll.rendezvous.door import ENTERING_S, Door
from gpucoll.rendezvous.door_place import DoorPlace, find_door
from gpucoll.rendezvous.held_signals import HeldSignals, held_signals
from gpucoll.rendezvous.job import Job
from gpucoll.transport.shared import MAX_RANKS
from gpucoll.transport.shared.layout import LAYOUT_VERSION
from gpucoll.version import __version__
from gpucoll.wording import rank_of

if TYPE_CHECKING:
    from gpucoll.api.communicator import Communicator
    from gpucoll.rendezvous.endpoint import PeerConnection
    from gpucoll.rendezvous.meeting_points import HandedPoint
    from gpucoll.rendezvous.meeting_store import AnyStore
    from gpucoll.rendezvous.tcp import TcpEndpoint
    from gpucoll.transport.tcp.credentials import Credentials

Create = Callable[..., Any]
"""The type of `gpucoll.api.communicator.create`, which stands on this module."""
SAME: Final = {"the version of gpucoll": __version__, "the layout of the segment": LAYOUT_VERSION}
FAILED_MEETING: Final = (
    AbortedError,
    AuthenticationError,
    DeadlineError,
    PeerLostError,
    RendezvousError,
)
"""Errors of a meeting in which another rank or newcomer may have failed, so that it is repeated."""
UNUSABLE: Final = (RendezvousError, UsageError, OSError, MemoryError)
"""Errors for which a rank cannot meet newcomers at a place, whatever the others do."""
_MOST_ATTEMPTS: Final = 4
_ON_THEIR_WAY_S: Final = 5.0
"""How long `grow` waits at most for asynchronous messages to end before it refuses."""


# --- the ranks that are there ---------------------------------------------------------------------


class Growing:
    """One call of `grow` on one rank.

    Parameters
    ----------
    communicator : Communicator
        The old communicator.
    create : callable
        Makes a communicator.
    place : DoorPlace
        Where newcomers wait.
    at_most : int or None
        How many newcomers rank 0 lets in.
    wait_s : float
        How long rank 0 waits for the first newcomer.
    limit_s : float
        How long each meeting may take.
    """

    def __init__(
        self,
        communicator: Communicator,
        create: Create,
        place: DoorPlace,
        at_most: int | None,
        wait_s: float,
        limit_s: float,
    ) -> None:
        self._old, self._group, self._create = communicator, communicator._group, create
        self._place, self._limit_s = place, limit_s
        self._wait_s = wait_s
        self._wanted, self._is_limited = at_most or 1, at_most is not None
        self._most = MAX_RANKS if at_most is None else at_most
        self._who = rank_of(communicator.rank, communicator.world_size)
        self._wish = communicator._gpu.wish_again()
        self._watch = GrowthWatch(self._group)
        self._newcomers: list[PeerConnection] = []
        if communicator.rank == 0:
            self._watch.gone_newcomers = self._gone_newcomers
        self._listener: socket.socket | None = None
        self._credentials: Credentials | None = None
        self._why = ""
        """Why the last attempt failed."""

    def run(self) -> Communicator:
        """Return the communicator to go on with: the old one if nobody has come.

        Raises
        ------
        AlikeError
            There is no new communicator. All old ranks raise this, and the old one stays usable.
        """
        for _ in range(_MOST_ATTEMPTS):
            plan = self._plan()
            if plan is None:
                return self._old
            made, vote = self._meet(plan)
            if self._is_made_by_all(plan, made, vote):
                assert made is not None
                return self._go_over(made)
            self._wait_s = 0.0
        text = f"{self._who} in {CALL}: {_MOST_ATTEMPTS} times, newcomers failed on the way. "
        last = f"The last time: {self._why}. " if self._why else ""
        raise AlikeError(RendezvousError(f"{text}{last}The communicator stays usable"))

    # --- the plan ---------------------------------------------------------------------------------

    def _plan(self) -> Plan | None:
        """Return rank 0's plan, which all old ranks get at one place between their collectives."""
        said: dict[str, Any] = {}
        if self._old.rank == 0:
            with held_signals() as signals:
                said.update(self._invite(partial(self._look, signals)))
        try:
            answers = self._tell(json.dumps(said).encode(), self._limit_s + self._wait_s)
            with _alike():
                plan = plan_of(json.loads(answers[0]), self._who)
            if plan is None:
                return None
            # Every rank is in this call by now, and sends no more messages.
            ready = self._tell(json.dumps(self._prepare(plan)).encode(), plan.limit_s)
            with _alike():
                check_ready([json.loads(each) for each in ready], self._who, self._place.text)
        except BaseException:
            self._close_listener()
            raise
        return plan

    def _prepare(self, plan: Plan) -> dict[str, str]:
        """Prepare for the meeting; return what stands in its way on this rank."""
        key = ""
        try:
            if plan.meet:
                self._credentials = self._own_credentials()
                key = key_of(plan, self._credentials)
            else:
                check_descriptors(job_of(plan, self._old.rank, None))
        except UNUSABLE as error:
            text = str(error) or type(error).__name__
            return {"trouble": text.removeprefix(self._who).lstrip(": ")}
        limit_s = min(_ON_THEIR_WAY_S, max(self._group.timeout_s, plan.limit_s))
        return {"unread": self._unread(limit_s), "key": key}

    def _own_credentials(self) -> Credentials:
        if self._old.rank == 0:
            return _tcp(self._door).credentials
        if self._place.point is None:
            raise RendezvousError("rank 0 was given meet, and this rank was not")
        return self._place.credentials(self._who)

    def _look(self, signals: HeldSignals) -> None:
        """At the door: raise if an old rank is lost."""
        signals.check()
        if (found := self._watch.check(())) is not None:
            raise self._watch.lost(*found)

    def _tell(self, data: bytes, limit_s: float) -> list[bytes]:
        """Tell all old ranks something; one may still be at the door, or in the meeting."""
        limit_s = max(self._group.timeout_s, limit_s) + ENTERING_S
        return self._old._runner.exchange_bytes(data, Collective.GROW, NO_ROOT, limit_s)

    def _unread(self, limit_s: float) -> str:
        """Return a description of messages that this rank has not received; empty: there are none.

        They would end with the old communicator. Asynchronous ones get time to end.
        """
        queue = self._old._point_to_point.queue
        try:
            queue.finish(limit_s)
        except DeadlineError:
            self._group.raise_if_aborted()
            return f"{queue.n_pending} asynchronous that nobody sends or receives"
        left = self._old._backend.messages.unreceived()
        return ", ".join(f"one from rank {peer} with tag {tag}" for peer, tag in left[:3])

    def _invite(self, look: Callable[[], None]) -> dict[str, Any]:
        """On rank 0: return the plan for the newcomers that are here."""
        try:
            door = self._open_door()
            door.wait(self._wanted, self._wait_s, look, is_limit=self._is_limited)
            room = MAX_RANKS - self._old.world_size if self._place.point is None else MAX_RANKS
            self._newcomers = door.ask(min(self._most, room), look)
            if not self._newcomers:
                return {}
            meet = ""
            if self._place.point is not None:
                meet = self._listen(door)
        except UNUSABLE as error:
            return {"trouble": str(error) or type(error).__name__}
        world_size = self._old.world_size + len(self._newcomers)
        self._old._n_growths += 1
        token = f"{CALL} {secrets.token_hex(16)}"
        return {"plan": Plan(self._old._n_growths, world_size, token, meet, self._limit_s)}

    @property
    def _door(self) -> Door:
        """The door, which rank 0 has opened."""
        assert self._old._door is not None
        return self._old._door

    def _open_door(self) -> Door:
        door: Door | None = self._old._door
        if door is not None and door.place.key != self._place.key:
            door.close()
            door = None
        if door is None:
            door = self._old._door = Door(self._place, self._who, SAME, self._old.epoch)
        return door

    def _listen(self, door: Door) -> str:
        """Listen for the meeting of a plan; return where, as ``host:port``."""
        from gpucoll.rendezvous.addresses import join_address
        from gpucoll.rendezvous.tcp import listen_at

        what = f"{self._who} cannot listen in {CALL}"
        self._listener = listen_at(_tcp(door).own_address(), 0, what, 4096)
        return join_address(*self._listener.getsockname()[:2])

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _send_plan(self, plan: Plan) -> None:
        wish = self._wish
        said = {
            "plan": plan,
            "n_old": self._old.world_size,
            "epoch": self._old.epoch + 1,
            "timeout_s": self._group.timeout_s,
            "wish": [wish.backend, wish.keeps_order, wish.mixed, wish.schedule],
        }
        for place, newcomer in enumerate(self._newcomers):
            self._door.tell([newcomer], {**said, "rank": self._old.world_size + place})

    # --- the meeting ------------------------------------------------------------------------------

    def _meet(self, plan: Plan) -> tuple[Communicator | None, Vote]:
        """Meet the others; return the new communicator, if there is one, and this rank's vote."""
        self._watch.has_begun = False
        if self._old.rank == 0:
            self._watch.call_newcomers = partial(self._send_plan, plan)
        try:
            job = job_of(plan, self._old.rank, self._point(plan))
            made = self._create(
                job, plan.limit_s, self._group.timeout_s, self._wish, self._watch, connects=False
            )
        except (GpucollError, MemoryError, OSError) as error:
            self._group.raise_if_aborted()
            self._why = str(error)
            is_shared = self._watch.has_begun and isinstance(error, FAILED_MEETING)
            return None, Vote(False, "" if is_shared else f"{type(error).__name__}: {error}")
        finally:
            self._close_listener()
        try:
            return made, Vote(self._old.rank != 0 or self._have_made(plan))
        except BaseException:
            drop(made)
            raise

    def _gone_newcomers(self) -> list[int]:
        gone = self._door.gone(self._newcomers) if self._newcomers else []
        return [self._old.world_size + place for place in gone]

    def _have_made(self, plan: Plan) -> bool:
        """Return, on rank 0, whether all newcomers have what the meeting has made."""
        with held_signals() as signals:
            look = partial(self._look, signals)
            made = self._door.hear(self._newcomers, "made", plan.limit_s, look)
        if len(made) < len(self._newcomers):
            self._why = "a newcomer did not say that it has the new communicator"
        return len(made) == len(self._newcomers)

    def _point(self, plan: Plan) -> HandedPoint | None:
        if not plan.meet:
            return None
        assert self._credentials is not None
        listener, self._listener = self._listener, None
        return handed(plan, self._credentials, listener)

    def _is_made_by_all(self, plan: Plan, made: Communicator | None, vote: Vote) -> bool:
        """Return whether all old ranks have the new communicator; if not, none keeps it."""
        try:
            votes = [Vote.decode(data) for data in self._tell(vote.encode(), plan.limit_s)]
        except GpucollError:
            # An old rank is lost; another may have had all votes, and may have gone over.
            if made is not None and self._group.settle_growth(plan.number, False):
                return True
            drop(made)
            raise
        except BaseException:
            drop(made)
            raise
        if all(each.has_made for each in votes):
            if self._group.settle_growth(plan.number, True):
                return True
            drop(made)
            raise give_up_growth(self._group)
        drop(made)
        self.send_away()
        if troubles := [(rank, each.trouble) for rank, each in enumerate(votes) if each.trouble]:
            shown = "; ".join(f"rank {rank}: {text}" for rank, text in troubles[:3])
            text = f"{self._who} cannot {CALL}: {shown}. The communicator stays usable"
            raise AlikeError(RendezvousError(text))
        return False

    def send_away(self) -> None:
        """On rank 0: tell the newcomers that this attempt has failed."""
        if self._old._door is not None:
            self._old._door.tell(self._newcomers, {"out": True})

    def _go_over(self, made: Communicator) -> Communicator:
        """Let the newcomers in, and close the old communicator."""
        old, resumed_from = self._old, self._group.completed
        try:
            if old.rank == 0:
                self._door.dismiss(self._newcomers, {"in": True, "resumed_from": resumed_from})
                made._door, old._door = old._door, None
            note(made, old.world_size, old.epoch + 1, resumed_from)
            old._retire(self._limit_s)
            arrive(made, self._limit_s)
        except BaseException:  # Ctrl-C: nobody else has the new communicator
            drop(made)
            raise
        return made


class AlikeError(Exception):
    """Carries an error that all old ranks raise, after which the communicator stays usable."""

    def __init__(self, error: GpucollError) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def _alike() -> Iterator[None]:
    """Mark the errors raised in the context as those that all old ranks raise."""
    try:
        yield
    except GpucollError as error:
        raise AlikeError(error) from None


def grow(
    communicator: Communicator,
    create: Create,
    meet: str | AnyStore | None,
    name: str | None,
    at_most: int | None,
    wait_s: float,
    timeout_s: float | None,
) -> Communicator:
    """Return the communicator of this one's ranks and of newcomers; see `Communicator.grow`."""
    config.check_timeout_s(timeout_s)
    _check(at_most, wait_s)
    place = find_door(meet, name)
    group = communicator._group
    group.check_open()
    if communicator._runner.grouped is not None:
        raise StateError(f"{CALL} cannot be called inside group(): call it outside")
    who = rank_of(communicator.rank, communicator.world_size)
    if group.over_mpi is not None:
        raise StateError(f"{who}: a communicator of MPI's ranks cannot grow: MPI adds none")
    if place.point is None and group.interface:
        raise ArgumentError(
            f"{who}: the ranks are on several hosts, and nothing says where newcomers find them: "
            'give grow(meet="tcp://HOST:PORT") of rank 0\'s host, or meet="file:///PATH"'
        )
    communicator._check_idle(CALL)
    limit_s = group.timeout_s if timeout_s is None else timeout_s
    growing = Growing(communicator, create, place, at_most, wait_s, limit_s)
    try:
        return growing.run()
    except AlikeError as alike:
        raise alike.error from None
    except MismatchError:  # all ranks raise it here
        raise
    except BaseException as error:
        growing.send_away()
        give_up(group, error)
        raise


def _check(at_most: object, wait_s: object) -> None:
    if at_most is not None:
        if isinstance(at_most, bool) or not isinstance(at_most, int):
            raise ArgumentTypeError(f"at_most must be an int or None; got {at_most!r}")
        if at_most < 1:
            raise ArgumentError(f"at_most must be at least 1; got {at_most}")
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float):
        raise ArgumentTypeError(f"wait_s must be a number of seconds; got {wait_s!r}")
    if not 0 <= wait_s <= config.LONGEST_TIMEOUT_S:
        raise ArgumentError(
            f"wait_s must be between 0 and {config.LONGEST_TIMEOUT_S:g} seconds; got {wait_s!r}"
        )


# --- what newcomers do, too -----------------------------------------------------------------------


def _tcp(door: Door) -> TcpEndpoint:
    from gpucoll.rendezvous.tcp import TcpEndpoint

    assert isinstance(door.endpoint, TcpEndpoint)
    return door.endpoint


def handed(
    plan: Plan, credentials: Credentials, listener: socket.socket | None = None
) -> HandedPoint:
    """Return the point at which a plan's ranks meet over TCP."""
    from gpucoll.rendezvous.meeting_points import HandedPoint

    return HandedPoint(plan.meet, credentials, listener)


def key_of(plan: Plan, credentials: Credentials) -> str:
    """Return a word that two ranks have in common if they know the same secret."""
    from gpucoll.transport.tcp.secret import extract

    return extract(f"gpucoll {plan.token}".encode(), credentials.secret).hex()[:32]


def job_of(plan: Plan, rank: int, point: HandedPoint | None) -> Job:
    """Return the job in which a plan's ranks meet."""
    return Job(rank, plan.world_size, plan.token, CALL, meet=point, title=plan.token)


def note(made: Communicator, n_old: int, epoch: int, resumed_from: int | None) -> None:
    """Let a new communicator tell what it has grown from."""
    made.epoch, made.resumed_from = epoch, resumed_from
    made.former_ranks = tuple(range(n_old))
    made._group.n_founders = n_old


def arrive(made: Communicator, timeout_s: float) -> None:
    """Make the first call on the new communicator, by which all know that all have gone over.

    A rank that is lost by now is lost to the new communicator, whose next call says so.
    """
    with contextlib.suppress(GpucollError):
        made.barrier(timeout_s=timeout_s)


def drop(made: Communicator | None) -> None:
    """Release a communicator that not all have."""
    if made is not None:
        made._give_up()
