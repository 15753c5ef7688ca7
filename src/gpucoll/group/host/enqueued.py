"""Calls on GPU arrays beside the work: what each rank enqueues is compared, without waiting.

The caller posts a record (`enqueued_entry`) in a fraction of a microsecond. Somebody else, a thread
or who asks for certainty, compares later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gpucoll.backends.gpu.enqueue_entry import (
    DRIVER_TABLE_WORDS,
    ENQUEUE_BLOCK_WORDS,
    SETTINGS_AT,
    DriverTable,
    EnqueueBlock,
    enqueue_call,
)
from gpucoll.devices import Device
from gpucoll.group.host.diagnosis import difference
from gpucoll.group.host.enqueued_records import compare_calls, post_call
from gpucoll.group.host.group import HostGroup
from gpucoll.kernels.cpu.builtins import METH_FASTCALL, METH_NOARGS, builtin, capsule
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.layout import ENQUEUED_FAILED
from gpucoll.transport.shared.words import Call, Context, Status

Words: TypeAlias = npt.NDArray[np.int64]
"""What compiled code reads by address."""

SEQUENCE = int(Context.ENQUEUED_SEQUENCE)
"""Place in `EnqueuedCalls.words` of the number of the last call that this rank posted."""


class EnqueuedCalls:
    """This rank's ring of calls on GPU arrays, and how far all ranks agree.

    Parameters
    ----------
    group : HostGroup
        The ranks; their segment has room for such records.
    """

    def __init__(self, group: HostGroup) -> None:
        self._group = group
        self._context = group.context
        self.words = group.context.data
        """Of the group's context: an item of it is an int, in half the time."""

    @property
    def sequence(self) -> int:
        """The number of the last call that this rank posted."""
        return self.words[SEQUENCE]

    @property
    def compared(self) -> int:
        """The number of the last call that was the same on every rank."""
        return difference(int(self._group.members.enqueued_line(self._group.rank)[0]), 0)

    def is_compared(self, sequence: int) -> bool:
        """Return whether this call was the same on every rank."""
        return difference(self.compared, sequence) >= 0

    @property
    def has_uncompared(self) -> bool:
        """Whether this rank has posted calls of which that is not known."""
        return difference(self.compared, self.sequence) < 0

    def poster(self, block: CallBlock) -> Callable[[], int]:
        """Return the built-in that posts this call and returns a `Status`; keep the block."""
        block.words[Call.CONTEXT] = self._context.ctypes.data
        post: Callable[[], int] = builtin(
            post_call.address, METH_NOARGS, capsule(block.words.ctypes.data)
        )
        return post

    def driver_table(self, device: Device) -> Words:
        """Return the driver_table of this GPU: what `enqueuer` needs to know of its driver."""
        words = np.zeros(DRIVER_TABLE_WORDS, np.int64)
        for place, address in device.addresses().items():
            words[DriverTable[place]] = address
        return words

    def enqueuer(
        self,
        driver_table: Words,
        block: CallBlock,
        function: int,
        settings: Sequence[int],
        poll: int,
    ) -> tuple[Callable[..., int], Words]:
        """Return the built-in that posts a call and enqueues it, and the words it stands on.

        See `enqueue_entry`. One thread at a time may be on the driver_table. The caller keeps the block,
        and the words.

        Parameters
        ----------
        driver_table : array
            Of `driver_table`.
        block : CallBlock
            What is posted; made for this ring by `poster`.
        function : int
            Address of the library's function.
        settings : sequence of int
            Its arguments between the two addresses and the communicator.
        poll : int
            Address of the library's function that says of a communicator whether it is busy.
        """
        words = np.zeros(ENQUEUE_BLOCK_WORDS, np.int64)
        words[EnqueueBlock.DRIVER_TABLE] = driver_table.ctypes.data
        words[EnqueueBlock.CALL] = block.words.ctypes.data
        words[EnqueueBlock.FUNCTION] = function
        words[EnqueueBlock.POLL] = poll
        words[EnqueueBlock.N_SETTINGS] = len(settings)
        first = EnqueueBlock.ARGUMENTS + SETTINGS_AT
        words[first : first + len(settings)] = settings
        enqueue: Callable[..., int] = builtin(
            enqueue_call.address, METH_FASTCALL, capsule(words.ctypes.data)
        )
        return enqueue, words

    def compare(self) -> Status:
        """Compare as far as all ranks have posted: OK, MORE (a rank is late) or MISMATCH."""
        return Status(compare_calls.ctypes(self._context.ctypes.data))

    @property
    def late_rank(self) -> int:
        """The rank that the last `compare` found late; -1: none."""
        return int(self._context[Context.ENQUEUED_LATE])

    # --- connecting -------------------------------------------------------------------------------

    def say_failed(self) -> None:
        """Tell the ranks that wait for this one's GPU that it will not come."""
        self._group.members.enqueued_line(self._group.rank)[ENQUEUED_FAILED // 8] += 1

    def failed_ranks(self) -> list[int]:
        """Return the ranks that said so."""
        members = self._group.members
        return [
            rank
            for rank in range(members.world_size)
            if members.enqueued_line(rank)[ENQUEUED_FAILED // 8]
        ]
