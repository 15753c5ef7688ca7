"""The compiled entry of one collective: NumPy arrays straight into machine code.

`gpucoll.entries.collectives.collective_entry` finds the call block by the identity of three Python
objects, the array's dtype, the op and the root, in a small table. Python fills the table as it
meets new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpucoll.arrays import numpy_struct
from gpucoll.entries import collectives, lists
from gpucoll.group.host.group import HostGroup
from gpucoll.kernels.cpu.builtins import METH_FASTCALL, builtin, capsule
from gpucoll.transport.shared.call_block import CallBlock

SEGMENT_WORDS = 3


class EntryTable:
    """The table of one collective, or of one kind of message.

    Parameters
    ----------
    group : HostGroup
        Whose calls.
    code : compiled function
        `collective_entry` or `message_entry`.
    sends : bool
        Whether messages of one array are sent.

    Attributes
    ----------
    call : callable
        ``(x, out, op, root)`` -> `out`, or None where Python has to look: unknown objects, other
        kinds of array, overlap, errors.
    """

    def __init__(
        self, group: HostGroup, code: Any = collectives.collective_entry, *, sends: bool = False
    ) -> None:
        self._group = group
        self._table = np.zeros(collectives.TABLE_WORDS, np.int64)
        self._table[collectives.TABLE_CONTEXT] = group.context_address
        self._table[collectives.TABLE_ARRAY_TYPE] = id(np.ndarray)
        self._table[collectives.TABLE_NONE] = id(None)
        self._table[collectives.TABLE_INT_TYPE] = id(int)
        self._table[collectives.TABLE_SENDS] = sends
        self._table[collectives.TABLE_LIST_TYPE] = id(list)
        self._entries: list[tuple[np.dtype[Any], object, object, CallBlock]] = []
        self.call: Callable[..., Any] = _never
        if numpy_struct.matches():
            holder = capsule(self._table.ctypes.data)
            self.call = builtin(code.address, METH_FASTCALL, holder)

    def learn(
        self, dtype: np.dtype[Any], op: object, root: object, make: Callable[[], CallBlock]
    ) -> None:
        """Serve arrays of this dtype object with this op and root object from now on.

        They are kept alive here, so that no other object can take their identity. The oldest entry
        goes when the table is full.
        """
        if self._group.is_running:
            return  # another thread's call may be using a block that this one would push out
        if any(a is dtype and b is op and c is root for a, b, c, _ in self._entries):
            return
        block = make()
        self._group.bind(block)
        self._entries = [(dtype, op, root, block), *self._entries][: collectives.MAX_ENTRIES]
        self._table[collectives.TABLE_COUNT] = 0
        for place, (*objects, held) in enumerate(self._entries):
            start = collectives.TABLE_ENTRIES + place * collectives.ENTRY_WORDS
            self._table[start : start + collectives.ENTRY_WORDS] = (
                *map(id, objects),
                held.words.ctypes.data,
            )
        self._table[collectives.TABLE_COUNT] = len(self._entries)


def _never(*arguments: Any) -> None:
    """Leave every call to Python: this interpreter's arrays do not lie in memory as expected."""


class ListEntryTable(EntryTable):
    """The table of fused lists: ``(xs, outs, op)`` -> `outs`, or None."""

    def __init__(self, group: HostGroup) -> None:
        super().__init__(group, lists.list_entry)
        self._segments = np.zeros(lists.MOST_ARRAYS * SEGMENT_WORDS, np.int64)
        self._seen = np.zeros(lists.SEEN_WORDS, np.int64)
        self._table[collectives.TABLE_SEGMENTS] = self._segments.ctypes.data
        self._table[collectives.TABLE_SEEN] = self._seen.ctypes.data
