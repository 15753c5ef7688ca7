"""A wait for messages in compiled code: a context, a call block, and the function that runs it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from gpucoll.backends.cpu.host.message_loop import message_loop
from gpucoll.backends.cpu.host.message_rows import Rows
from gpucoll.collectives import Collective
from gpucoll.entries import collectives
from gpucoll.kernels.cpu.builtins import METH_NOARGS, builtin, capsule
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.words import Call, Context

_ROWS, _N_ROWS = int(Call.transfers), int(Call.n_transfers)
_IS_STARTED, _LEAVES = int(Call.is_started), int(Call.leaves)
_UNTIL_NS = int(Call.until_ns)
_Words = npt.NDArray[np.int64]


class Waiter:
    """A private context and call block for one thread that waits for messages."""

    def __init__(self, table: _Words, context: _Words) -> None:
        context[Context.transfers] = table.ctypes.data
        context[Context.slice_ns] = 0
        self.context = context
        self.block = CallBlock(Collective.SEND, message_loop.address)
        self.words = self.block.words
        self.shown = memoryview(self.words.data)
        """The same words; reading one of them takes a tenth of the time."""
        self.states = memoryview(context.data)
        self.words[Call.context] = context.ctypes.data
        self.words[Call.largest_bytes] = layout.NEVER  # other threads run meanwhile
        code = collectives.prepared_call.address
        self.run: Callable[[], int] = builtin(code, METH_NOARGS, capsule(self.words.ctypes.data))

    def set_rows(
        self, rows: Rows, count: int, *, is_started: bool, leaves: bool, until_ns: int = 0
    ) -> None:
        """Set what to wait for, whether it was started, and whether a signal ends only the wait."""
        words = self.shown
        words[_ROWS], words[_N_ROWS] = rows.address, count
        words[_IS_STARTED], words[_LEAVES] = is_started, leaves
        words[_UNTIL_NS] = until_ns
