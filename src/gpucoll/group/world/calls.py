"""How a rank makes a call that spans hosts: its number, its beginning, and its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from gpucoll.errors import GpucollError, MismatchError
from gpucoll.group.world.call import WorldCall
from gpucoll.group.world.failures import failure_of
from gpucoll.group.world.news import WorldNews
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.words import Context, Status
from gpucoll.transport.tcp.exchange_words import Outcome


class WorldCalls(WorldNews):
    """Makes calls that span hosts, in Python or in compiled code."""

    @contextlib.contextmanager
    def call(self, name: str, timeout_s: float | None = None) -> Iterator[WorldCall]:
        """Run a collective that spans hosts within the block.

        An exception that any rank of this host raises in it ends the call on all hosts.
        """
        self.check_usable(timeout_s)
        made = WorldCall(self, self._take_number(), name, timeout_s)
        self._board.enter(self.host.rank, self.number)
        self._calling = name
        try:
            self._check_closed(self.number)
            yield made
            self.exchanges.completed = self.number
        except MismatchError as error:
            made.fail(error)
            raise
        except BaseException as error:
            self._break_off(error)
            raise
        finally:
            self._calling = ""

    def _take_number(self) -> int:
        self.exchanges.number += 1
        return self.number

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
        exchanges = self.exchanges
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        self.check_usable(timeout_s)
        self._block = block
        with self._small_call(timeout_s):
            self._check_closed(self.number + 1)
            if self.links is not None and not exchanges.is_open:
                call = self._call_now(timeout_s, 1)
                self._board.enter(self.host.rank, self.number + 1)
                try:
                    call.open_exchanges(exchanges)
                except BaseException:
                    self._take_number()  # this rank had entered the call
                    raise
            exchanges.words.may_run = 1
            try:
                status = self.host.run_prepared(run, timeout_s, goes_on=(Status.NOT_YET,))
            finally:
                exchanges.words.may_run = 0
            if status == Status.NOT_YET and exchanges.outcome != Outcome.NONE:
                self._call_now(timeout_s).end_small_call(exchanges)
        assert status == Status.OK, "nothing goes another way"

    def _call_now(self, timeout_s: float, ahead: int = 0) -> WorldCall:
        """Return the call that compiled code has made, or is about to make."""
        self._calling = self._called
        return WorldCall(self, self.number + ahead, self._calling, timeout_s)

    @contextlib.contextmanager
    def _small_call(self, timeout_s: float) -> Iterator[None]:
        """End the call on all hosts if the block raises."""
        self._is_in_small_call = True
        try:
            yield
        except MismatchError as error:
            if self.exchanges.outcome == Outcome.NONE:  # the ranks of this host differ
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

    def _break_off(self, error: BaseException) -> None:
        """Give the group up for an error that ended a call here: all others wait for this rank."""
        if isinstance(error, GpucollError):
            self._raised = error
        if self.bulk is not None:
            self.bulk.close_connections()
        self.exchanges.close_connections()
        if not self.is_aborted:
            if isinstance(error, GpucollError):
                self.write(failure_of(error, self.rank))
            else:
                self.host.abort(Abort.INTERRUPTED)
        self.ring()

    def _check_closed(self, number: int) -> None:
        """Raise if a rank on another host has closed before this call."""
        if not self._board.has_closed_ranks():
            return
        for rank in range(self.world_size):
            after = self._board.closed_after(rank)
            if after is not None and after < number and rank != self.rank:
                self.raise_if_aborted()  # the reason may have come in just now
                raise self._lost_error(rank)

    def raise_for(self, status: int) -> None:
        """Raise what a compiled loop's status means; return if the call is left to Python."""
        if status in (Status.NO_ROOM, Status.NOT_RUN):
            self._raise_for(status)
            return
        if status == Status.NOT_YET and self.exchanges.outcome == Outcome.NONE:
            self.host.reset_timeout()
            return
        timeout_s = int(self.host.context[Context.timeout_ns]) / 1e9
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
