"""The compiled entry of one collective: passes arrays directly to machine code.

`gpucoll.entries.collective_entry` finds the call block in a small table, by the identity of three
Python objects: the array's dtype, the op and the root. Python adds new combinations to the table.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpucoll.arrays import numpy_struct
from gpucoll.entries import (
    block_arguments,
    block_entry,
    collective_entry,
    collectives,
    lists,
    objects,
    started,
)
from gpucoll.group.host.group import HostGroup
from gpucoll.kernels.cpu.builtins import METH_FASTCALL, builtin, capsule
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.words import Call, Context, Segment, State


class Entry(NamedTuple):
    """One entry of the table, with the objects whose identities it holds."""

    key: int
    dtype: object
    op: object
    root: object
    block: CallBlock


class EntryTable:
    """The table of one collective, or of one kind of message.

    Parameters
    ----------
    group : HostGroup
        The group of the calls.
    code : compiled function
        `collective_entry` or `message_entry`.
    sends : bool
        Whether the table is for sends of one array.

    Attributes
    ----------
    call : callable
        ``(x, out, op, root, timeout_s)`` -> `out`, or None if Python must handle the call: unknown
        objects, other kinds of array, overlap, errors.
    """

    def __init__(
        self,
        group: HostGroup,
        code: Any = collective_entry.collective_entry,
        *,
        sends: bool = False,
    ) -> None:
        self._group, self._context = group, group.context
        self._table = np.zeros(collectives.EntryTable.n_words, np.int64)
        self._table[collectives.EntryTable.context] = group.context_address
        self._table[collectives.EntryTable.array_type] = id(np.ndarray)
        self._table[collectives.EntryTable.none] = id(None)
        self._table[collectives.EntryTable.int_type] = id(int)
        self._table[collectives.EntryTable.sends] = sends
        self._table[collectives.EntryTable.list_type] = id(list)
        self._table[collectives.EntryTable.float_type] = id(float)
        self._table[collectives.EntryTable.tuple_type] = id(tuple)
        self._entries: list[Entry] = []
        self._learning = threading.Lock()
        self._gone: list[Entry] = []
        """Entries removed while a call may be using their blocks."""
        self.call: Callable[..., Any] = _never
        if numpy_struct.matches():
            self.call = self.entry_of(code)

    @property
    def address(self) -> int:
        """Where compiled code finds it."""
        return int(self._table.ctypes.data)

    def entry_of(self, code: Any) -> Callable[..., Any]:
        """Return a built-in of this table, which must be kept."""
        made: Callable[..., Any] = builtin(
            code.address, METH_FASTCALL, capsule(self._table.ctypes.data)
        )
        return made

    def starter(self) -> Callable[..., Any]:
        """Return the entry that starts calls: ``(x, out, op, root)`` -> the number, or None."""
        if not numpy_struct.matches():
            return _never
        self._table[collectives.EntryTable.queue] = self._group.started_calls().address
        return self.entry_of(started.start_entry)

    def learn(
        self,
        dtype: object,
        op: object,
        root: object,
        make: Callable[[], CallBlock],
        *,
        key: int | None = None,
        tensor_table: int = 0,
    ) -> None:
        """Serve arrays of this dtype object with this op and root object from now on.

        The table keeps these objects alive, so that no other object can take their identity. If the
        table is full, the oldest entry is removed. For `key`, by default the dtype's identity, and
        `tensor_table` see `gpucoll.arrays.array_kinds.ArrayKind`. Does nothing while another thread
        is in this method.
        """
        key = id(dtype) if key is None else key
        if self._learning.locked():
            return  # an entry written by two threads might name a block that neither keeps
        with self._learning:
            if any(e.key == key and e.op is op and e.root is root for e in self._entries):
                return
            if self._is_at_rest():
                self._gone.clear()
            elif len(self._gone) >= collectives.MAX_ENTRIES:
                return  # one long call would otherwise need ever more memory
            if tensor_table:
                self._table[collectives.EntryTable.tensors] = tensor_table
            block = make()
            self._group.bind(block)
            self._put_first(Entry(key, dtype, op, root, block))

    def _is_at_rest(self) -> bool:
        """Return whether no call of this table runs and no call that it started is pending."""
        context = self._context
        return int(context[Context.state]) != State.BUSY and not int(context[Context.pending])

    def _put_first(self, entry: Entry) -> None:
        entries = [entry, *self._entries]
        self._gone += entries[collectives.MAX_ENTRIES :]
        self._entries = entries[: collectives.MAX_ENTRIES]
        self._table[collectives.EntryTable.count] = 0
        for place, each in enumerate(self._entries):
            start = collectives.EntryTable.entries + place * collectives.Entry.n_words
            objects = each.key, id(each.op), id(each.root), each.block.words.ctypes.data
            self._table[start : start + collectives.Entry.n_words] = objects
        self._table[collectives.EntryTable.count] = len(self._entries)


def _never(*arguments: Any) -> None:
    """Leave every call to Python: this interpreter's arrays are not laid out as expected."""


class ListEntryTable(EntryTable):
    """The table of fused lists: ``(xs, outs, op, timeout_s)`` -> `outs`, or None."""

    def __init__(self, group: HostGroup) -> None:
        super().__init__(group, lists.list_entry)
        self._segments = np.zeros(lists.MOST_ARRAYS * Segment.n_words, np.int64)
        self._seen = np.zeros(lists.SEEN_WORDS, np.int64)
        self._table[collectives.EntryTable.segments] = self._segments.ctypes.data
        self._table[collectives.EntryTable.seen] = self._seen.ctypes.data


class BlockEntryTable(EntryTable):
    """The table of one collective with counts or lists of blocks.

    Its entry is ``(x, out, op, root, timeout_s, counts, receive_counts)`` -> `out`, or None.
    """

    def __init__(self, group: HostGroup) -> None:
        super().__init__(group, block_entry.block_entry)
        self._blocks = np.zeros(block_arguments.TABLES * (group.world_size + 1), np.int64)
        self._table[collectives.EntryTable.blocks] = self._blocks.ctypes.data


class ObjectEntry:
    """The entry of the first round of an object collective with one root.

    Parameters
    ----------
    group : HostGroup
        The group of the calls.
    block : CallBlock
        Exchanges the ranks' rows.
    root : int
        The rank whose row the entry returns.

    Attributes
    ----------
    call : callable
        `gpucoll.entries.objects.object_entry`.
    """

    def __init__(self, group: HostGroup, block: CallBlock, root: int) -> None:
        group.bind(block)
        self._block = block
        self._table = table = objects.ObjectTable.new()
        row_bytes = int(block.words[Call.size_bytes])
        table.context = Context(group.context_address)
        table.call = Call(block.words.ctypes.data)
        table.none = id(None)
        table.mine = objects.Row(int(block.words[Call.source]))
        table.sent = objects.Row(int(block.words[Call.destination]) + root * row_bytes)
        table.row_bytes = row_bytes
        self.call: Callable[[bytes | None], bytes | int] = builtin(
            objects.object_entry.address, METH_FASTCALL, capsule(table.address)
        )


class MessageEntries(EntryTable):
    """The compiled entries of sends or receives."""

    def __init__(
        self, group: HostGroup, code: Any, context: npt.NDArray[np.int64], *, sends: bool
    ) -> None:
        super().__init__(group, code, sends=sends)
        self._table[collectives.EntryTable.context] = context.ctypes.data
        self.context = self._context = context
        self._waits: CallBlock | None = None

    def wait_by(self, block: CallBlock) -> None:
        """Have entries of this table wait for one message by this call block."""
        self._group.bind(block)
        self._table[collectives.EntryTable.waits] = block.words.ctypes.data
        self._waits = block
