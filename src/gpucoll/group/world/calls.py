"""How a rank makes a call that spans hosts: its number, its beginning, and its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from gpucoll.errors import GpucollError, MismatchError
from gpucoll.group.world.call import WorldCall
from gpucoll.group.world.diagnosis import WorldDiagnosis
from gpucoll.group.world.failures import failure_of
from gpucoll.group.world.news import WorldNews
from gpucoll.group.world.state import WorldState
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.words import Context, Status
from gpucoll.transport.tcp.exchange_words import Outcome


class WorldCalls:
    """Makes calls that span hosts, in Python or in compiled code.

    Parameters
    ----------
    state : WorldState
        The group's state.
    diagnosis : WorldDiagnosis
        Makes its errors.
    news : WorldNews
        Tells the other hosts.
    """

    def __init__(self, state: WorldState, diagnosis: WorldDiagnosis, news: WorldNews) -> None:
        self._state = state
        self._diagnosis = diagnosis
        self._news = news

    @contextlib.contextmanager
    def call(self, name: str, timeout_s: float | None = None) -> Iterator[WorldCall]:
        """Run a collective that spans hosts within the block.

        An exception that any rank of this host raises in it ends the call on all hosts.
        """
        state = self._state
        state.check_usable(timeout_s)
        made = WorldCall(state, self._diagnosis, self._news, self._take_number(), name, timeout_s)
        state.board.enter(state.host.rank, state.number)
        state.calling = name
        try:
            self._check_closed(state.number)
            yield made
            state.exchanges.completed = state.number
        except MismatchError as error:
            made.fail(error)
            state.host.add_report(error)
            raise
        except BaseException as error:
            self._break_off(error)
            raise
        finally:
            state.calling = ""

    def _take_number(self) -> int:
        self._state.exchanges.number += 1
        return self._state.number

    def run_small(
        self, run: Callable[[], int], block: CallBlock, timeout_s: float | None = None
    ) -> None:
        """Run a prepared small call.

        Parameters
        ----------
        run : callable
            Runs the block, whose loop is the one of `exchanges`; returns its `Status`.
        block : CallBlock
            The call.
        timeout_s : float, optional
            Deadline of the call, in seconds.
        """
        state = self._state
        exchanges = state.exchanges
        timeout_s = state.timeout_s if timeout_s is None else timeout_s
        state.check_usable(timeout_s)
        state.block = block
        with self._small_call(timeout_s):
            self._check_closed(state.number + 1)
            if state.links is not None and not exchanges.is_open:
                call = self._call_now(timeout_s, 1)
                state.board.enter(state.host.rank, state.number + 1)
                try:
                    call.open_exchanges(exchanges)
                except BaseException:
                    self._take_number()  # this rank had entered the call
                    raise
            exchanges.words.may_run = 1
            try:
                status = state.host.run_prepared(run, timeout_s, goes_on=(Status.NOT_YET,))
            finally:
                exchanges.words.may_run = 0
            if status == Status.NOT_YET and exchanges.outcome != Outcome.NONE:
                self._call_now(timeout_s).end_small_call(exchanges)
        assert status == Status.OK, "nothing goes another way"

    def _call_now(self, timeout_s: float, ahead: int = 0) -> WorldCall:
        """Return the call that compiled code has made, or is about to make."""
        state = self._state
        state.calling = state.called
        return WorldCall(
            state, self._diagnosis, self._news, state.number + ahead, state.calling, timeout_s
        )

    @contextlib.contextmanager
    def _small_call(self, timeout_s: float) -> Iterator[None]:
        """End the call on all hosts if the block raises."""
        state = self._state
        state.is_in_small_call = True
        try:
            yield
        except MismatchError as error:
            if state.exchanges.outcome == Outcome.NONE:  # the ranks of this host differ
                self._call_now(timeout_s).fail(error)
            state.host.add_report(error)
            raise
        except BaseException as error:
            state.calling = state.called
            self._break_off(error)
            raise
        finally:
            state.is_in_small_call = False
            state.block = None
            state.calling = ""

    def _break_off(self, error: BaseException) -> None:
        """Give the group up for an error that ended a call here: all others wait for this rank."""
        state = self._state
        if isinstance(error, GpucollError):
            state.raised = error
        if not state.is_aborted:
            if isinstance(error, GpucollError):
                state.write(failure_of(error, state.rank))
            else:
                state.host.abort(Abort.INTERRUPTED)
        state.ring()
        # Last: whoever sees these end takes this host for lost, unless it has heard why.
        if state.bulk is not None:
            state.bulk.close_connections()
        state.exchanges.close_connections()
        if isinstance(error, GpucollError):
            state.host.add_report(error)

    def _check_closed(self, number: int) -> None:
        """Raise if a rank on another host has closed before this call."""
        state = self._state
        if not state.board.has_closed_ranks():
            return
        for rank in range(state.world_size):
            after = state.board.closed_after(rank)
            if after is not None and after < number and rank != state.rank:
                state.raise_if_aborted()  # the reason may have come in just now
                raise self._diagnosis.lost_error(rank)

    def raise_for(self, status: int) -> None:
        """Raise what a compiled loop's status means; return if the call is left to Python."""
        state = self._state
        if status in (Status.NO_ROOM, Status.NOT_RUN):
            self._raise_for(status)
            return
        if status == Status.NOT_YET and state.exchanges.outcome == Outcome.NONE:
            state.host.reset_timeout()
            return
        timeout_s = int(state.host.context[Context.timeout_ns]) / 1e9
        with self._small_call(timeout_s):
            if status != Status.NOT_YET:
                self._raise_for(status)
            state.host.reset_timeout()
            self._call_now(timeout_s).end_small_call(state.exchanges)

    def _raise_for(self, status: int) -> None:
        state = self._state
        try:
            state.host.raise_for(status)
        except GpucollError as error:
            if state.is_aborted and state.raised is None:
                state.raised = error
            state.ring()
            raise
        except BaseException:
            state.ring()
            raise
