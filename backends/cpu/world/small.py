"""Small collectives between hosts: call blocks for the compiled loop, and its entries.

`gpucoll.transport.tcp.small_calls` runs them from beginning to end. Calls that it leaves to Python
are made like all other calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpucoll.arrays.array_kinds import ArrayKind
from gpucoll.backends.cpu.host.backend import BlockMaker
from gpucoll.backends.cpu.host.entry_tables import EntryTable
from gpucoll.backends.cpu.world.phases import Bytes, input_of, output_of, put_into
from gpucoll.backends.protocol import NotStarted, Request, not_run
from gpucoll.collectives import NO_ROOT, Collective, Flow
from gpucoll.group.world.exchanges import Exchanges
from gpucoll.group.world.group import WorldGroup
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.words import Call, Context, Status
from gpucoll.types import ReduceOp


class SmallCall(NotStarted):
    """A prepared call on the path of small calls.

    Parameters
    ----------
    group : WorldGroup
        The ranks.
    block : CallBlock
        The call's block; this object owns it from here on.
    request : Request
        The call.

    Attributes
    ----------
    run_once : callable
        Runs the call if nothing prevents it, and returns its `Status`.
    """

    def __init__(self, group: WorldGroup, block: CallBlock, request: Request) -> None:
        self._group = group
        self._block = block
        self._request = request
        set_loop(block, group.exchanges)
        self._is_packed = bool(request.sources or request.destinations or request.parts)
        self.run_once: Callable[[], int] = not_run
        if not self._is_packed:
            self.run_once = group.host.prepare(block)
        self._run_queued: Callable[[], int] | None = None
        self._packed: tuple[Bytes, Bytes] | None = None
        """Memory for the loop, which must outlive a call that was given up."""

    def run(self, timeout_s: float | None = None) -> None:
        """Run the call; raise the error if it fails."""
        if self._run_queued is None:
            self._run_queued = self._group.host.prepare(self._block, queued=True)
        if not self._is_packed:
            self._group.calls.run_small(self._run_queued, self._block, timeout_s)
            return
        source, output = self._packed = input_of(self._request), output_of(self._request)
        words = self._block.words
        words[Call.source], words[Call.destination] = source.ctypes.data, output.ctypes.data
        self._group.calls.run_small(self._run_queued, self._block, timeout_s)
        put_into(self._request, output)
        self._packed = None


class SmallEntries:
    """The compiled entries of collectives of several hosts.

    Parameters
    ----------
    group : WorldGroup
        The ranks.
    blocks : BlockMaker
        Makes this rank's call blocks.
    """

    def __init__(self, group: WorldGroup, blocks: BlockMaker) -> None:
        self._group = group
        self._blocks = blocks
        self._tables: dict[Collective, EntryTable] = {}

    def entry(self, collective: Collective) -> Callable[..., Any]:
        """Return the entry of a collective: see `gpucoll.backends.protocol.HostBackend`."""
        if collective.is_list:
            return self.serve_nothing
        if collective not in self._tables:
            self._tables[collective] = EntryTable(self._group.host)
        return self._tables[collective].call

    def native_table(self, collective: Collective) -> int:
        """Return the address of the table of a collective; 0 if it has none."""
        self.entry(collective)
        return self._tables[collective].address if collective in self._tables else 0

    def serve_nothing(self, *_: object) -> None:
        """Leave a call to Python, without an error."""
        self._group.host.context[Context.status] = Status.NOT_RUN

    def learn(self, collective: Collective, kind: ArrayKind, op: Any, root: Any) -> None:
        """Make the entry serve arrays of this kind with these arguments from now on."""
        table = self._tables.get(collective)
        # An entry compares the root with the rank's number on its host: tensors' flags depend on
        # it.
        if table is None or (kind.tensor_table and collective.flow == Flow.TO_ROOT):
            return

        def make() -> CallBlock:
            parsed = None if op is None else ReduceOp.parse(op)
            place = NO_ROOT if root is None else root
            block = self._blocks.plain(collective, kind.dtype, kind.item_bytes, parsed, place)
            set_loop(block, self._group.exchanges)
            return block

        table.learn(kind.native, op, root, make, key=kind.key, tensor_table=kind.tensor_table)


def set_loop(block: CallBlock, exchanges: Exchanges) -> None:
    """Have a call block run only by the loop of several hosts."""
    block.words[Call.loop] = exchanges.loop
    block.words[Call.post] = block.words[Call.finish] = 0
