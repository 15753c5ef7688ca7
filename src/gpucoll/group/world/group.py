"""The ranks of several hosts: what a communicator stands on that spans them.

Each host's ranks are a `HostGroup`, whose loops, waits and diagnosis are used as they are. The
first rank of each host leads it: it alone has links to other hosts. A collective goes from the
ranks of a host to its leader, between the leaders, and back. Whatever breaks the communicator,
anywhere, is written on every host's board and into its segment's abort word, at which every wait
looks.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gpucoll.errors import (
    AbortedError,
    DeadlineError,
    GpucollError,
    MismatchError,
    PeerLostError,
)
from gpucoll.group.host import diagnosis
from gpucoll.group.host.channel import ControlChannel
from gpucoll.group.host.group import HostGroup
from gpucoll.group.host.records import describe_block, describe_call
from gpucoll.group.host.whereabouts import Whereabouts
from gpucoll.group.protocol import EnqueuedCalls, StartedCalls
from gpucoll.group.survivors import Agreement
from gpucoll.group.world import gpu_calls
from gpucoll.group.world.ballots import Ballots
from gpucoll.group.world.board import Board, Failure
from gpucoll.group.world.bulk import Bulk
from gpucoll.group.world.call import WorldCall
from gpucoll.group.world.exchanges import Connections, Exchanges
from gpucoll.group.world.failures import BROKEN, error_of, failure_of
from gpucoll.group.world.hosts import Hosts
from gpucoll.group.world.inquiry import said_by
from gpucoll.group.world.links import LINKS_THREAD, Links
from gpucoll.group.world.messages import Kind, Message
from gpucoll.group.world.pairs import Pairs
from gpucoll.group.world.reunion import MeetingPlaces
from gpucoll.rendezvous.addresses import join_address
from gpucoll.rendezvous.handed_point import HandedPoint
from gpucoll.rendezvous.held_signals import held_signals
from gpucoll.rendezvous.job import Job
from gpucoll.rendezvous.tcp import listen_at
from gpucoll.topology.interfaces import interface_of
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.layout import EVENT_ABORT, Abort
from gpucoll.transport.shared.words import Context, State, Status
from gpucoll.transport.tcp.credentials import Credentials
from gpucoll.transport.tcp.exchange_words import Outcome, Word
from gpucoll.wording import list_ranks, rank_of

_SHOWN = 8
_WRITING_S = 0.1
_ANSWERING_S = 0.5
"""How long leaders may take to say where their ranks are, when one has given up."""


class WorldGroup:
    """This rank's part in a group of ranks on several hosts.

    Parameters
    ----------
    host : HostGroup
        The ranks of this host; belongs to this from here on, as do the next three.
    board : Board
        What they know of the others.
    links : Links or None
        To the other hosts, where this rank leads.
    bulk : Bulk or None
        For large arrays, likewise.
    connections : Connections or None
        For small ones, likewise.
    pairs : Pairs
        For messages.
    hosts : Hosts
        Who is where.
    names : tuple of str
        What errors call the hosts.
    bell_fd : int
        Wakes the leader's thread.
    credentials : Credentials
        By which parts of the group that meet anew know each other.
    address : str
        Of this host, on the interface that is used.
    places : MeetingPlaces
        Where the hosts meet again after losses; belongs to this, as does the next.
    ballots : Ballots
        What this host's ranks promise others then.
    """

    def __init__(
        self,
        host: HostGroup,
        board: Board,
        links: Links | None,
        bulk: Bulk | None,
        connections: Connections | None,
        pairs: Pairs | None,
        hosts: Hosts,
        names: tuple[str, ...],
        bell_fd: int,
        credentials: Credentials,
        address: str,
        places: MeetingPlaces,
        ballots: Ballots,
    ) -> None:
        self.host = host
        self.hosts = hosts
        self.names = names
        self.links = links
        self.bulk = bulk
        self.pairs = pairs
        self.rank = host.members.number(host.rank)
        self.world_size = hosts.world_size
        self.here = hosts.host_of(self.rank)
        """This host's number."""
        self.channel = ControlChannel(host)
        """Between the ranks of this host."""
        self._board = board
        self._bell_fd = bell_fd
        self._credentials = credentials
        self._address = address
        self._places = places
        self._ballots = ballots
        self.exchanges: Exchanges | None = None
        """What compiled small calls stand on; None: everything small goes over the links."""
        if not self.is_encrypted:
            self.exchanges = Exchanges(
                hosts,
                self.rank,
                connections,
                entered=board.entered_address(host.rank),
                n_closed=board.n_closed_address,
                abort=host.members.at(EVENT_ABORT),
                bell_fd=bell_fd,
            )
            host.context[Context.HOSTS] = self.exchanges.address
        self._n_calls = 0
        self._n_completed = 0
        self._calling = ""
        self._is_in_small_call = False
        self._block: CallBlock | None = None
        """Of the small call that Python has begun."""
        self._raised: GpucollError | None = None
        """What has broken this rank's call: only that call knows how long it has waited."""
        self._answers: dict[int, dict[str, str]] = {}
        self._n_asked = 0
        self._told_closed: set[int] = set()
        self._has_told_failure = False
        self._gpu_calls = gpu_calls.GpuCalls(self, board)
        self._telling = threading.RLock()
        host.error_elsewhere = self._error_elsewhere
        host.standing_elsewhere = self._standing_elsewhere
        if pairs is not None:  # whose thread must not keep this alive
            members = host.members
            pairs.answer = lambda: Whereabouts(members).standing_of(members.rank).text
        host.lost_elsewhere = lambda place: self._lost_error(host.members.number(place))
        if links is not None:
            links.serve(self, host.members.life_fds())

    @property
    def is_encrypted(self) -> bool:
        """Whether all that goes between hosts is: alike on all ranks."""
        return self._credentials.tls is not None

    # --- as the protocol has it -------------------------------------------------------------------

    @property
    def timeout_s(self) -> float:
        """Default deadline of every wait, in seconds."""
        return self.host.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self.host.timeout_s = timeout_s
        self.host.reset_timeout()

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
        """Whether that was raised to somebody."""
        return self.host.was_told

    @was_told.setter
    def was_told(self, was_told: bool) -> None:
        self.host.was_told = was_told

    @property
    def failure(self) -> GpucollError | None:
        """Why it is broken."""
        return self.host.failure

    @property
    def is_closed(self) -> bool:
        """Whether this rank takes part no more."""
        return self.host.is_closed

    @property
    def is_in_use(self) -> bool:
        """Whether a thread that cannot be ended may still look at what is shared."""
        return self.host.is_in_use

    @is_in_use.setter
    def is_in_use(self, is_in_use: bool) -> None:
        self.host.is_in_use = is_in_use

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child's copy, which can do nothing."""
        return self.host.is_forked

    @property
    def is_running(self) -> bool:
        """Whether a call is running at this moment, in some thread of Python's."""
        return bool(self._calling) or self._is_in_small_call or self.host.is_running

    @property
    def is_aborted(self) -> bool:
        """Whether some rank has given the group up."""
        return self.host.is_aborted

    @property
    def needs_settling(self) -> bool:
        """Whether no call can run before `check_usable`, or at all."""
        return self.host.needs_settling

    @property
    def completed(self) -> int:
        """The number of the last collective that this rank has completed."""
        return self._n_completed if self.exchanges is None else self.exchanges.completed

    def agreement(self, timeout_s: float) -> Agreement:
        """Return this rank's part in agreeing who goes on after losses."""
        from gpucoll.group.world.shrinking import WorldAgreement

        return WorldAgreement(self, self._places, self._ballots, self._address, timeout_s)

    def check_alive(self) -> None:
        """Raise where this rank has closed the communicator, or is a forked child."""
        self.host.check_alive()

    def check_open(self) -> None:
        """Raise where no call can ever run again."""
        self.host.check_open()

    def check_usable(self, timeout_s: float | None = None) -> None:
        """Raise unless a call can run now; settle what an earlier mismatch left to be settled."""
        self.host.check_usable(timeout_s)

    def raise_if_aborted(self) -> None:
        """Raise, now and from now on, where the group has been given up."""
        try:
            self.host.raise_if_aborted()
        except GpucollError:
            self.ring()
            raise

    def raise_for(self, status: int) -> None:
        """Raise what a compiled loop's status means; return where the call is left to Python."""
        if status in (Status.NO_ROOM, Status.NOT_RUN) or self.exchanges is None:
            self._raise_for(status)
            return
        if status == Status.NOT_YET and self.exchanges.outcome == Outcome.NONE:
            self.host.reset_timeout()
            return
        timeout_s = int(self.host.context[Context.TIMEOUT_NS]) / 1e9
        with self._small_call(timeout_s):
            if status != Status.NOT_YET:
                self._raise_for(status)
            self.host.reset_timeout()
            self._call_now(timeout_s).end_small_call(self.exchanges)

    def _raise_for(self, status: int) -> None:
        try:
            self.host.raise_for(status)
        except GpucollError as error:
            if self.is_aborted and self._raised is None:
                self._raised = error
            self.ring()
            raise
        except BaseException:
            self.ring()
            raise

    def ended_ranks(self) -> list[int]:
        """Return the ranks of this host whose process has ended."""
        return [self.host.members.number(place) for place in self.host.ended_ranks()]

    def has_closed(self, rank: int) -> bool:
        """Return whether a rank has closed the communicator."""
        if self.hosts.host_of(rank) == self.here:
            return self.host.has_closed(self.hosts.place_of(rank))
        return self._board.closed_after(rank) is not None

    def gone_ranks(self) -> list[int]:
        """Return the ranks that will never take part again: ended here, or closed anywhere."""
        here = {self.host.members.number(place) for place in self.host.gone_ranks()}
        others = (rank for rank in range(self.world_size) if rank != self.rank)
        return [rank for rank in others if rank in here or self.has_closed(rank)]

    def abort(
        self, code: Abort = Abort.REQUESTED, rank: int | None = None, sequence: int | None = None
    ) -> None:
        """Give the group up for all ranks, unless somebody already has."""
        if code in gpu_calls.INQUIRED and sequence is not None:
            self._gpu_calls.give_up(code, sequence)
        elif rank is None or self.hosts.host_of(rank) == self.here:
            place = None if rank is None else self.hosts.place_of(rank)
            self.host.abort(code, place, sequence)
        else:
            self.write(failure_of(self._error_of(code, rank, sequence), self.rank))
        self.ring()

    def _error_of(self, code: Abort, rank: int, sequence: int | None) -> GpucollError:
        """Return the error for a rank of another host, for whose sake the group is given up."""
        if code == Abort.ENQUEUED_LOST and sequence is not None:
            return self._gpu_calls.lost_error(rank, sequence, self._how_it_went(rank))
        return self._lost_error(rank) if code == Abort.LOST else self._gave_up_error(rank)

    def break_with(self, code: Abort, rank: int) -> None:
        """Give the group up for all ranks, unless somebody already has; raise."""
        self.abort(code, rank)
        self.raise_if_aborted()

    def abort_error(self, waited_s: float | None = None) -> GpucollError:
        """Return the error for why it was given up."""
        error = self.host.abort_error(waited_s)
        if waited_s is not None and isinstance(error, DeadlineError):
            return said_by(error, self._who, waited_s)
        return error

    def fail(self, error: GpucollError) -> GpucollError:
        """Note why it is broken, and return it: every later call raises that."""
        return self.host.fail(error)

    def enqueued_calls(self) -> EnqueuedCalls:
        """Return this rank's ring of calls on GPU arrays."""
        return self._gpu_calls.enqueued_calls()

    def started_calls(self) -> StartedCalls:
        """Return the queue in which compiled code runs started calls; none of several hosts."""
        return self.host.started_calls()

    def hold(self, n_reasons: int) -> None:
        """Let compiled entries leave every call to Python, while there are reasons for it."""
        self.host.hold(n_reasons)

    def bind_cpus(self) -> None:
        """Bind this process to CPUs of its own, where the ranks of the host share enough."""
        self.host.bind_cpus()

    def meeting_of(
        self, ranks: Sequence[int], token: str, call: str, tell: Callable[[bytes], list[bytes]]
    ) -> Job:
        """Return the job of this rank and others of the group, who meet anew."""
        spans = len({self.hosts.host_of(rank) for rank in ranks}) > 1
        listener = None
        if spans and ranks[0] == self.rank:
            listener = listen_at(self._address, 0, f"{self._who} cannot listen in {call}", 4096)
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
        """Return what is worth knowing: name -> sentence."""
        placed = "; ".join(
            f"{name}: {list_ranks(ranks)}"
            for name, ranks in zip(self.names, self.hosts.ranks, strict=True)
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
        """Keep what takes this rank out of the group, for the others."""
        self.host.note_exception(error)

    def close(self) -> None:
        """Say that this rank takes part no more, and let go of everything shared."""
        if self.is_closed or self.is_forked:
            return
        with held_signals():  # an interrupt in the middle would leave some of it
            if self.bulk is not None:
                self.bulk.close()
            if self.exchanges is not None:
                self.exchanges.close()
            if self.links is not None:
                self.look()
                self._tell_closed(self.host.rank, self._number)
                self.is_in_use |= not self.links.close()
            else:
                self._board.enter(self.host.rank, self._number)
            self.host.close()
            if self.pairs is not None:  # who looked after it has been stopped
                self.pairs.close()
            self.ring()
            self._places.close()
            self._ballots.close()
            if not self.is_in_use:
                self._board.close()
                bell_fd, self._bell_fd = self._bell_fd, -1  # its number will be somebody else's
                os.close(bell_fd)

    def __del__(self) -> None:
        host = getattr(self, "host", None)  # not there where the constructor has raised
        if host is not None and not self.is_closed and not self.is_forked:
            text = f"communicator of {self._who} was not closed"
            warnings.warn(text, ResourceWarning, stacklevel=2)
            self.close()

    # --- calls ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def call(self, name: str, timeout_s: float | None = None) -> Iterator[WorldCall]:
        """Run a collective of all hosts within the block.

        What is raised in it by any rank of this host ends it on all hosts.
        """
        self.check_usable(timeout_s)
        made = WorldCall(self, self._take_number(), name, timeout_s)
        self._board.enter(self.host.rank, self._number)
        self._calling = name
        try:
            self._check_closed(self._number)
            yield made
            self._note_completed()
        except MismatchError as error:
            made.fail(error)
            raise
        except BaseException as error:
            self._break_off(error)
            raise
        finally:
            self._calling = ""

    @property
    def _number(self) -> int:
        """Number of the last call."""
        return self._n_calls if self.exchanges is None else self.exchanges.number

    def _take_number(self) -> int:
        if self.exchanges is None:
            self._n_calls += 1
        else:
            self.exchanges.number += 1
        return self._number

    def _note_completed(self) -> None:
        if self.exchanges is None:
            self._n_completed = self._number
        else:
            self.exchanges.completed = self._number

    def run_small(
        self, run: Callable[[], int], block: CallBlock, timeout_s: float | None = None
    ) -> bool:
        """Run a prepared small call; return False where it goes another way, and has not begun.

        Parameters
        ----------
        run : callable
            Runs the block, whose loop is that of `exchanges`; returns its `Status`.
        block : CallBlock
            The call.
        timeout_s : float, optional
            Its deadline.
        """
        exchanges = self.exchanges
        assert exchanges is not None
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        self.check_usable(timeout_s)
        self._block = block
        with self._small_call(timeout_s):
            self._check_closed(self._number + 1)
            if self.links is not None and not exchanges.is_open:
                call = self._call_now(timeout_s, 1)
                self._board.enter(self.host.rank, self._number + 1)
                try:
                    call.open_exchanges(exchanges)
                except BaseException:
                    self._take_number()  # this rank had come to the call
                    raise
            exchanges.words[Word.MAY_RUN] = 1
            try:
                status = self.host.run_prepared(run, timeout_s, goes_on=(Status.NOT_YET,))
            finally:
                exchanges.words[Word.MAY_RUN] = 0
            if status == Status.NOT_YET and exchanges.outcome != Outcome.NONE:
                self._call_now(timeout_s).end_small_call(exchanges)
        return status == Status.OK

    def _call_now(self, timeout_s: float, ahead: int = 0) -> WorldCall:
        """Return the call that compiled code has made, or is about to make."""
        self._calling = self._called
        return WorldCall(self, self._number + ahead, self._calling, timeout_s)

    @contextlib.contextmanager
    def _small_call(self, timeout_s: float) -> Iterator[None]:
        """See to it, within the block, that what is raised there ends the call on all hosts."""
        assert self.exchanges is not None
        self._is_in_small_call = True
        try:
            yield
        except MismatchError as error:
            if self.exchanges.outcome == Outcome.NONE:  # the ranks of this host do not agree
                self._call_now(timeout_s).fail(error)
            raise
        except BaseException as error:
            self._calling = self._called
            self._break_off(error)
            raise
        finally:
            self._is_in_small_call = False
            self._block = None
            self._calling = ""

    @property
    def _called(self) -> str:
        """What this rank is calling, or has called last, as its user wrote it."""
        if self._calling:
            return self._calling
        if self._block is not None:
            return describe_block(self._block)
        host = self.host
        sequence = int(host.context[Context.SEQUENCE])
        return describe_call(host.members, host.rank, sequence) or "its first collective"

    def _break_off(self, error: BaseException) -> None:
        """Give the group up for what has ended a call here: all other ranks wait for this one."""
        if isinstance(error, GpucollError):
            self._raised = error
        if self.bulk is not None:
            self.bulk.close_connections()
        if self.exchanges is not None:
            self.exchanges.close_connections()
        if not self.is_aborted:
            if isinstance(error, GpucollError):
                self.write(failure_of(error, self.rank))
            else:
                self.host.abort(Abort.INTERRUPTED)
        self.ring()

    def _check_closed(self, number: int) -> None:
        """Raise where a rank on another host has closed before this call."""
        if not self._board.has_closed_ranks():
            return
        for rank in range(self.world_size):
            after = self._board.closed_after(rank)
            if after is not None and after < number and rank != self.rank:
                self.raise_if_aborted()  # why it has closed may just have been told
                raise self._lost_error(rank)

    def write(self, failure: Failure) -> None:
        """Break the communicator on this host, unless it is."""
        if not self.is_aborted:
            self._board.write(failure)
            self.host.abort(Abort.ELSEWHERE)

    def _error_elsewhere(self) -> GpucollError:
        stop = time.monotonic() + _WRITING_S
        while (failure := self._board.failure()) is None and time.monotonic() < stop:
            time.sleep(0.001)  # another rank is about to have written it
        if failure is None:
            return AbortedError(f"{self._who}: the communicator was given up. Close it")
        return error_of(failure, self.rank, self.world_size)

    # --- errors -----------------------------------------------------------------------------------

    @property
    def _who(self) -> str:
        return rank_of(self.rank, self.world_size)

    @property
    def _where(self) -> str:
        if self._calling or int(self.host.context[Context.STATE]) == State.BUSY:
            return f"in {self._called}"
        return "between two calls"

    def _host_name(self, rank: int) -> str:
        return self.names[self.hosts.host_of(rank)]

    def _lost_error(self, rank: int) -> PeerLostError:
        lost, how = f"rank {rank} (on {self._host_name(rank)})", self._how_it_went(rank)
        return PeerLostError(f"{self._who} lost {lost} {self._where}: {how}. {BROKEN}")

    def _how_it_went(self, rank: int) -> str:
        closed = self._board.closed_after(rank)
        if closed is None:
            return "its process ended"
        after = f" after call #{closed}" if closed else " before its first call"
        return f"it closed the communicator{after}{self._board.reason_of(rank)}"

    def _gave_up_error(self, rank: int) -> AbortedError:
        return AbortedError(
            f"{self._who}: the communicator was given up: rank {rank} aborted it. Close it"
        )

    def late_error(self, number: int, waited_s: float) -> DeadlineError:
        """Return the error for hosts that did not come; asks them where their ranks are."""
        assert self.links is not None
        self._n_asked += 1
        asked, others = self._n_asked, self.hosts.count - 1
        answers: dict[str, str] = {}
        self._answers[asked] = answers
        question = {"asker": self.here, "asked": asked, "number": number}
        self.links.tell_all(Kind.WHERE, question)
        self.links.wait(lambda: len(answers) == others or self.is_aborted, _ANSWERING_S)
        del self._answers[asked]
        silent = [
            list_ranks(ranks) + f" on {self.names[host]}"
            for host, ranks in enumerate(self.hosts.ranks)
            if host != self.here and str(host) not in answers
        ]
        found = [text for text in answers.values() if text]
        if silent:
            found.append(f"{'; '.join(silent)} did not answer (stopped, or their host is cut off)")
        late = ". ".join(found) or "all ranks had begun the call, and it had not come through"
        return DeadlineError(
            f"{self._who} waited {waited_s:g} s in {self._calling} between hosts: {late}. Is a "
            f"rank stopped, very slow, or in another part of the program? Give a longer timeout_s "
            f"if the work is uneven. {BROKEN}"
        )

    def _standing_elsewhere(self, places: list[int]) -> str:
        """Say where ranks of other hosts stand: the end of an error of this rank's wait."""
        ranks = [self.host.members.number(place) for place in places]
        # The links' thread must not wait; nor does it speak for a wait of its own.
        if not ranks or self.pairs is None or threading.current_thread().name == LINKS_THREAD:
            return ""
        answers = self.pairs.ask(ranks[:_SHOWN], _ANSWERING_S)
        told = []
        for rank in ranks[:_SHOWN]:
            silent = "not answering (stopped, or its host is cut off)"
            told.append(f"Rank {rank} on {self._host_name(rank)} is {answers.get(rank, silent)}")
        return "".join(f". {text}" for text in told)

    def _standings(self, number: int) -> str:
        """Say which ranks of this host have not begun a call, and where they are."""
        members = self.host.members
        late = [
            place
            for place in range(members.world_size)
            if self._board.entered(place) < number and not self.host.has_closed(place)
        ]
        if not late:
            return ""
        whereabouts = Whereabouts(members)
        texts = [
            f"rank {members.number(place)} is {whereabouts.standing_of(place).text}"
            for place in late[:_SHOWN]
        ]
        return f"{members.spelled(late)} had not arrived: {'; '.join(texts)}"

    # --- what the links tell, in their thread -----------------------------------------------------

    def ring(self) -> None:
        """Have the leader look what has happened on this host."""
        if (bell_fd := self._bell_fd) >= 0:
            with contextlib.suppress(OSError):  # rung already
                os.eventfd_write(bell_fd, 1)

    def hear(self, message: Message) -> None:
        """Take what another leader says to all."""
        facts = message.facts
        if message.kind == Kind.FAILED:
            self._has_told_failure = True  # whoever said it has told everybody
            self.write(Failure(int(facts["kind"]), int(facts["author"]), str(facts["text"])))
        elif message.kind == Kind.CLOSED:
            # What it has called on GPU arrays before may come by another way.
            host, told = self.hosts.host_of(int(facts["rank"])), int(facts["enqueued"])
            self._gpu_calls.after(host, told, lambda: self._note_closed(facts))
        elif message.kind in gpu_calls.KINDS:
            self._gpu_calls.hear(message)
        elif message.kind == Kind.WHERE:
            self.look()  # where these ranks have given up, that says more than where they are now
            answer = {key: facts[key] for key in ("asker", "asked")}
            text = self._standings(int(facts["number"]))
            assert self.links is not None
            self.links.tell_all(Kind.HERE, {**answer, "host": self.here, "text": text})
        elif message.kind == Kind.HERE and int(facts["asker"]) == self.here:
            answers = self._answers.get(int(facts["asked"]))
            if answers is not None:
                answers[str(facts["host"])] = str(facts["text"])

    def _note_closed(self, facts: Mapping[str, Any]) -> None:
        rank, number = int(facts["rank"]), int(facts["number"])
        self._board.note_closed(rank, number, str(facts["reason"]))
        self._end_calls_after(rank, number)

    def _end_calls_after(self, rank: int, number: int) -> None:
        """End the calls of this host's ranks that wait for one that has closed."""
        places = range(self.host.world_size)
        if any(
            self._board.entered(place) > number and not self.host.has_closed(place)
            for place in places
        ):
            self.write(failure_of(self._lost_error(rank), self.rank))
            self.look()

    def lose(self, host: int, reason: str) -> None:
        """Take that the link to a host has ended."""
        leader = self.hosts.leader_of(host)
        if self._board.closed_after(leader) is not None:
            return
        others = len(self.hosts.ranks[host]) - 1
        further = f" and the {others} other ranks there" if others > 1 else ""
        further = " and the other rank there" if others == 1 else further
        self.write(
            failure_of(
                PeerLostError(
                    f"{self._who} lost rank {leader} (on {self.names[host]}){further} "
                    f"{self._where}: the connection ended ({reason}): its process ended, or its "
                    f"host cannot be reached. {BROKEN}"
                ),
                self.rank,
            )
        )
        self.look()

    def lose_rank(self, rank: int, reason: str) -> None:
        """Take that the connection to a rank of another host has ended without a word."""
        if self.is_closed or self._board.closed_after(rank) is not None:
            return
        lost = f"rank {rank} (on {self._host_name(rank)})"
        text = (
            f"{self._who} lost {lost} {self._where}: the connection for messages ended ({reason}): "
            f"its process ended, or its host cannot be reached. {BROKEN}"
        )
        self.write(failure_of(PeerLostError(text), self.rank))
        self.ring()

    def miss(self, fd: int) -> None:
        """Take that a rank of this host has ended: on other hosts somebody may wait for it."""
        for place in self.host.ended_ranks():
            if not self.host.has_closed(place):
                self.host.abort(Abort.LOST, place)
        self.look()

    def go_deaf(self, error: Exception) -> None:
        """Take that the links' thread has ended by a fault."""
        self.write(
            failure_of(
                AbortedError(f"{self._who}: its links failed: {type(error).__name__}: {error}"),
                self.rank,
            )
        )

    def look(self) -> None:
        """Tell the other hosts what has happened on this one."""
        self._gpu_calls.look()
        with self._telling:  # another thread that closes must not overtake it
            if self.host.is_aborted and not self._has_told_failure:
                self._has_told_failure = True
                failure = self._board.failure() if self._is_elsewhere else None
                if failure is None:
                    failure = failure_of(self._raised or self.host.abort_error(), self.rank)
                assert self.links is not None
                self.links.tell_all(Kind.FAILED, asdict(failure))
        # Behind it: who was told of that, and closes, is not what the others have lost.
        for place in range(self.host.world_size):
            if place != self.host.rank and self.host.has_closed(place):
                self._tell_closed(place, self._board.entered(place))

    @property
    def _is_elsewhere(self) -> bool:
        return self.host.members.abort_word() & 0xFF == Abort.ELSEWHERE

    def _tell_closed(self, place: int, number: int) -> None:
        if place in self._told_closed:
            return
        self._told_closed.add(place)
        rank = self.host.members.number(place)
        reason = diagnosis.why(self.host, place)
        assert self.links is not None
        facts = {"rank": rank, "number": number, "reason": reason}
        self.links.tell_all(Kind.CLOSED, {**facts, "enqueued": self._gpu_calls.told})
