"""The group of the ranks of several hosts.

The ranks of each host form a `HostGroup`, whose loops, waits and diagnosis are used as they are.
The first rank of each host is its leader: it alone has links to other hosts. A collective goes from
the ranks of a host to their leader, between the leaders, and back. Whatever breaks the
communicator, on any host, is written on every host's board and into the abort word of its segment,
which every wait checks.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpucoll.errors import DeadlineError, GpucollError
from gpucoll.finalizers import is_first, leave, run_all
from gpucoll.group.host.group import HostGroup
from gpucoll.group.host.whereabouts import Whereabouts
from gpucoll.group.protocol import EnqueuedCalls, StartedCalls
from gpucoll.group.world.ballots import Ballots
from gpucoll.group.world.board import Board
from gpucoll.group.world.calls import WorldCalls
from gpucoll.group.world.diagnosis import WorldDiagnosis
from gpucoll.group.world.failures import failure_of
from gpucoll.group.world.gpu_calls import INQUIRED, GpuCalls
from gpucoll.group.world.inquiry import said_by
from gpucoll.group.world.news import WorldNews
from gpucoll.group.world.observers import Observers
from gpucoll.group.world.reunion import MeetingPlaces
from gpucoll.group.world.state import WorldState
from gpucoll.rendezvous.addresses import join_address
from gpucoll.rendezvous.held_signals import held_signals
from gpucoll.rendezvous.job import Job
from gpucoll.rendezvous.meeting_points import HandedPoint
from gpucoll.rendezvous.tcp import listen_at
from gpucoll.topology.interfaces import interface_of
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.tcp.handshake import encode_purpose
from gpucoll.transport.tcp.secret import DIGEST_BYTES, expand, extract
from gpucoll.wording import list_ranks

if TYPE_CHECKING:
    from gpucoll.group.survivors import Agreement
    from gpucoll.group.world.joining import Joined


class WorldGroup:
    """This rank's part in a group of ranks on several hosts.

    Parameters
    ----------
    host : HostGroup
        The ranks of this host; it belongs to this group from here on, as does all else.
    joined : Joined
        The result of the meeting: which ranks are on which host, and the leader's connections.
    board : Board
        What the ranks of this host know of the other hosts.
    bell_fd : int
        Descriptor that wakes the leader's thread.
    places : MeetingPlaces
        Where the hosts meet again after losses.
    ballots : Ballots
        What this host's ranks promise other hosts then.
    """

    def __init__(
        self,
        host: HostGroup,
        joined: Joined,
        board: Board,
        bell_fd: int,
        places: MeetingPlaces,
        ballots: Ballots,
    ) -> None:
        self.state = state = WorldState(host, joined, board, bell_fd)
        self.host = host
        self.hosts = state.hosts
        self.links = state.links
        self.bulk = state.bulk
        self.pairs = state.pairs
        self.exchanges = state.exchanges
        self.channel = state.channel
        self.rank = state.rank
        self.world_size = state.world_size
        self.here = state.here
        self.is_encrypted = state.is_encrypted
        self.keeps_order = False
        self.over_mpi: Any = None
        self.n_founders = 0
        self._address = joined.address
        self._credentials = joined.credentials
        secret = extract(b"gpucoll objects", joined.credentials.secret)
        self._object_key = expand(secret, encode_purpose("objects", joined.group), DIGEST_BYTES)
        self._places = places
        self._ballots = ballots
        self._gpu_calls = GpuCalls(state)
        self._diagnosis = WorldDiagnosis(state)
        self.news = WorldNews(state, self._diagnosis, self._gpu_calls)
        self.calls = WorldCalls(state, self._diagnosis, self.news)
        self._connect()

    def _connect(self) -> None:
        """Let the ranks of this host, and the threads of its connections, ask and tell this rank.

        None of them gets a reference to this group, which it would keep alive.
        """
        host, diagnosis = self.host, self._diagnosis
        members = host.members
        host.spans_hosts = True
        host.error_elsewhere = diagnosis.error_elsewhere
        host.standing_elsewhere = diagnosis.standing_elsewhere
        host.tell_elsewhere = self.state.ring
        host.lost_elsewhere = lambda place: diagnosis.lost_error(members.number(place))
        if self.pairs is not None:
            self.pairs.answer = lambda: Whereabouts(members).standing_of(members.rank).text
        if self.links is not None:
            names, ranks, tell = self.state.names, self.hosts.ranks, self.links.tell_all
            observers = Observers(members.job.group, self.here, names, ranks, tell)
            self.links.serve(self.news, members.life_fds(), observers)

    # --- as the protocol has it -------------------------------------------------------------------

    @property
    def local_rank(self) -> int:
        """This rank's place among the ranks of its host."""
        return self.host.rank

    @property
    def interface(self) -> str:
        """The network interface that links this host to the others."""
        return interface_of(self._address).name

    @property
    def was_told(self) -> bool:
        """Whether `failure` has been raised to the program."""
        return self.host.was_told

    @was_told.setter
    def was_told(self, was_told: bool) -> None:
        self.host.was_told = was_told

    @property
    def failure(self) -> GpucollError | None:
        """The error that broke the group; None: it is not broken."""
        return self.host.failure

    @property
    def is_in_use(self) -> bool:
        """Whether a thread that cannot be ended may still look at what is shared."""
        return self.host.is_in_use

    @is_in_use.setter
    def is_in_use(self, is_in_use: bool) -> None:
        self.host.is_in_use = is_in_use

    @property
    def timeout_s(self) -> float:
        """Default deadline of every wait, in seconds."""
        return self.state.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self.state.timeout_s = timeout_s

    @property
    def number(self) -> int:
        """The number of the last collective that this rank has begun; the same on every rank."""
        return self.state.number

    @property
    def is_closed(self) -> bool:
        """Whether this rank has left the group."""
        return self.host.is_closed

    @property
    def is_aborted(self) -> bool:
        """Whether some rank has given the group up."""
        return self.host.is_aborted

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child's copy, which cannot be used."""
        return self.host.is_forked

    @property
    def is_running(self) -> bool:
        """Whether a Python thread is running a call at this moment."""
        state = self.state
        return bool(state.calling) or state.is_in_small_call or self.host.is_running

    @property
    def is_in_collective(self) -> bool:
        """Whether compiled code is running a collective at this moment, in whatever thread."""
        return self.host.is_in_collective

    @property
    def was_interrupted(self) -> bool:
        """Whether an interrupt in this rank's call has broken it, so that the program knows."""
        return self.host.was_interrupted

    @property
    def needs_settling(self) -> bool:
        """Whether no call can run until `check_usable` has settled something, or ever again."""
        return self.host.needs_settling

    @property
    def object_key(self) -> bytes | None:
        """Key of the tags of objects; None: TLS protects everything that moves between hosts."""
        return None if self.is_encrypted and self.over_mpi is None else self._object_key

    @property
    def completed(self) -> int:
        """The number of the last collective that this rank has completed."""
        return self.exchanges.completed

    def agreement(self, timeout_s: float) -> Agreement:
        """Return this rank's part in the agreement on the survivors after losses."""
        from gpucoll.group.world.shrinking import WorldAgreement

        return WorldAgreement(self, self._places, self._ballots, self._address, timeout_s)

    def settle_growth(self, number: int, made: bool) -> bool:
        """Decide, once for all ranks of this host, whether a growth is made; return which it is."""
        return self.host.settle_growth(number, made)

    def check_alive(self) -> None:
        """Raise if this rank has closed the communicator, or is a forked child."""
        self.host.check_alive()

    def check_usable(self, timeout_s: float | None = None) -> None:
        """Raise unless a call can run now; first settle what an earlier mismatch has left open."""
        self.state.check_usable(timeout_s)

    def raise_if_aborted(self) -> None:
        """Raise, now and from now on, if the group has been given up."""
        self.state.raise_if_aborted()

    def raise_for(self, status: int) -> None:
        """Raise what a compiled loop's status means; return if the call is left to Python."""
        self.calls.raise_for(status)

    def check_open(self) -> None:
        """Raise if no call can ever run again."""
        self.host.check_open()

    def ended_ranks(self) -> list[int]:
        """Return the ranks of this host whose process has ended."""
        return [self.host.members.number(place) for place in self.host.ended_ranks()]

    def has_closed(self, rank: int) -> bool:
        """Return whether a rank has closed the communicator."""
        return self.state.has_closed(rank)

    def gone_ranks(self) -> list[int]:
        """Return the ranks that will never take part again: ended here, or closed anywhere."""
        here = {self.host.members.number(place) for place in self.host.gone_ranks()}
        others = (rank for rank in range(self.world_size) if rank != self.rank)
        return [rank for rank in others if rank in here or self.has_closed(rank)]

    def abort(
        self, code: Abort = Abort.REQUESTED, rank: int | None = None, sequence: int | None = None
    ) -> None:
        """Give the group up for all ranks, unless a rank already has."""
        if code in INQUIRED and sequence is not None:
            self._gpu_calls.give_up(code, sequence)
        elif rank is None or self.hosts.host_of(rank) == self.here:
            place = None if rank is None else self.hosts.place_of(rank)
            self.host.abort(code, place, sequence)
        else:
            self.state.write(failure_of(self._error_of(code, rank, sequence), self.rank))
        self.state.ring()

    def _error_of(self, code: Abort, rank: int, sequence: int | None) -> GpucollError:
        """Return the error for a rank of another host that makes this rank give the group up."""
        if code == Abort.ENQUEUED_LOST and sequence is not None:
            return self._gpu_calls.lost_error(rank, sequence, self._diagnosis.how_it_went(rank))
        return (
            self._diagnosis.lost_error(rank)
            if code == Abort.LOST
            else self._diagnosis.gave_up_error(rank)
        )

    def break_with(self, code: Abort, rank: int, why: str = "") -> None:
        """Give the group up for all ranks, unless a rank already has; raise the error."""
        if why and self.hosts.host_of(rank) != self.here:
            self.state.write(failure_of(self._diagnosis.gave_up_error(rank, why), self.rank))
            self.state.ring()
        else:
            self.abort(code, rank)
        self.raise_if_aborted()

    def abort_error(self, waited_s: float | None = None) -> GpucollError:
        """Return the error for why it was given up."""
        error = self.host.abort_error(waited_s)
        if waited_s is not None and isinstance(error, DeadlineError):
            return said_by(error, self.state.who, waited_s)
        return error

    def fail(self, error: GpucollError) -> GpucollError:
        """Store the error that broke the group, and return it; later calls raise it."""
        return self.host.fail(error)

    def end_calls(self) -> bool:
        """Let no call begin, give up one that runs in another thread; return whether it ended."""
        return self.host.end_calls()

    def enqueued_calls(self) -> EnqueuedCalls:
        """Return this rank's ring of calls on GPU arrays."""
        return self._gpu_calls.enqueued_calls()

    def started_calls(self) -> StartedCalls:
        """Return the queue in which compiled code runs started calls; none of them spans hosts."""
        return self.host.started_calls()

    def hold(self, n_reasons: int) -> None:
        """Make compiled entries leave every call to Python while `n_reasons` is not 0."""
        self.host.hold(n_reasons)

    def bind_cpus(self) -> None:
        """Bind this process to CPUs of its own, if the ranks of the host share enough of them."""
        self.host.bind_cpus()

    def meeting_of(
        self, ranks: Sequence[int], token: str, call: str, tell: Callable[[bytes], list[bytes]]
    ) -> Job:
        """Return the job in which this rank and others of the group meet anew."""
        spans = len({self.hosts.host_of(rank) for rank in ranks}) > 1
        listener = None
        if spans and ranks[0] == self.rank:
            listener = listen_at(
                self._address, 0, f"{self.state.who} cannot listen in {call}", 4096
            )
        try:
            mine = "" if listener is None else join_address(*listener.getsockname()[:2])
            addresses = tell(mine.encode())
        except BaseException:
            if listener is not None:
                listener.close()
            raise
        if not ranks:
            return Job(0, 1, token, call)
        place = list(ranks).index(self.rank)
        if not spans:
            return Job(place, len(ranks), token, call)
        point = HandedPoint(addresses[ranks[0]].decode(), self._credentials, listener)
        return Job(place, len(ranks), token, call, meet=point, title=token)

    def describe(self) -> Mapping[str, str]:
        """Return facts about the group for people to read: name -> sentence."""
        placed = "; ".join(
            f"{name}: {list_ranks(ranks)}"
            for name, ranks in zip(self.state.names, self.hosts.ranks, strict=True)
        )
        leader = self.hosts.leader_of(self.here)
        links = f"none here: rank {leader} leads this host"
        if self.links is not None:
            interface = interface_of(self._address)
            guarded = "authenticated, not encrypted"
            if self.is_encrypted:
                guarded = "authenticated, encrypted by TLS 1.3"
            links = (
                f"TCP, {guarded}, from {interface.name} (MTU {interface.mtu}) to "
                f"{self.links.describe()}; arrays over further connections, "
                f"{self.bulk.describe() if self.bulk is not None else guarded}"
            )
        return {"hosts": placed, "links": links, **self.host.describe()}

    def note_exception(self, error: BaseException) -> None:
        """Store the exception that takes this rank out of the group, for the others to read."""
        self.host.note_exception(error)

    def close(self) -> None:
        """Report that this rank leaves the group, and release everything shared."""
        if self.is_closed or self.is_forked:
            return
        with held_signals():  # an interrupt in the middle would leave something open
            if is_first(self, "close"):
                self._let_go()

    def _let_go(self) -> None:
        run_all(
            *([] if self.bulk is None else [self.bulk.close]),
            self.exchanges.close,
            self._leave,
            self.host.close,
            *([] if self.pairs is None else [self.pairs.close]),  # its thread was stopped
            self.state.ring,
            self._places.close,
            self._ballots.close,
            self._close_board,
        )

    def _leave(self) -> None:
        """Report to the other hosts that this rank leaves the group; release the links."""
        if self.links is None:
            self.state.board.enter(self.host.rank, self.number)
            return
        self.news.look()
        self.news.tell_closed(self.host.rank, self.number)
        self.is_in_use |= not self.links.close()

    def _close_board(self) -> None:
        if not self.is_in_use:
            self.state.board.close()
            bell_fd, self.state.bell_fd = (
                self.state.bell_fd,
                -1,
            )  # the number may be used for another file
            os.close(bell_fd)

    def __del__(self) -> None:
        host = getattr(self, "host", None)  # missing if the constructor has raised
        if host is not None and not self.is_closed and not self.is_forked:
            leave(self.close)
            text = f"communicator of {self.state.who} was not closed"
            warnings.warn(text, ResourceWarning, stacklevel=2)
