"""The CPU backend: call blocks for host buffers, and the compiled road of small messages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from gpucoll.arrays import numpy_struct
from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.numpy_arrays import check_dtype
from gpucoll.backends.cpu.all_reduce import all_reduce_loop
from gpucoll.backends.cpu.broadcast import broadcast_loop
from gpucoll.control import entry
from gpucoll.control.call import CallBlock
from gpucoll.control.group import HostGroup
from gpucoll.kernels.cpu.reduce import parameter_for, parts_per_element, reduce_kernel
from gpucoll.transport.builtins import METH_FASTCALL, builtin, capsule
from gpucoll.transport.layout import Call, Path
from gpucoll.types import Collective, ReduceOp

DirectCall = Callable[[Any, Any, Any], Any]


class CpuCall:
    """A prepared call of this backend: one built-in over one call block."""

    def __init__(self, group: HostGroup, block: CallBlock) -> None:
        self._group = group
        self._block = block
        self.run_once = group.prepare(block)
        """Runs it, unless asynchronous calls are queued, and returns its `Status`."""

    def run(self, timeout_s: float | None = None) -> None:
        """Do it; raise what went wrong."""
        self._group.run(self._block, timeout_s)


class CpuBackend:
    """Host buffers of the ranks of one host.

    Parameters
    ----------
    group : HostGroup
        The ranks, around their segment.
    """

    name = "cpu"

    def __init__(self, group: HostGroup) -> None:
        self._group = group
        self._table = np.zeros(entry.TABLE_WORDS, np.int64)
        self._table[entry.TABLE_CONTEXT] = group.context.ctypes.data
        self._table[entry.TABLE_ARRAY_TYPE] = id(np.ndarray)
        self._table[entry.TABLE_NONE] = id(None)
        self._entries: list[tuple[np.dtype[Any], Any, CallBlock]] = []
        self.direct_all_reduce = self._make_direct()
        """``(x, out, op)`` -> `out`, or None where Python has to look (see `control.entry`)."""

    def _make_direct(self) -> DirectCall:
        if not numpy_struct.matches():
            return lambda x, out, op: None
        holder = capsule(self._table.ctypes.data)
        direct: DirectCall = builtin(entry.direct_call.address, METH_FASTCALL, holder)
        return direct

    # --- collectives -----------------------------------------------------------------------------

    def all_reduce(self, source: Buffer, destination: Buffer, op: ReduceOp) -> CpuCall:
        """Prepare an all_reduce."""
        block = self._reduction(source.dtype, source.item_bytes, op)
        keep = (source.owner, destination.owner)
        block.set_arrays(source.shape, source.address, destination.address, keep)
        return CpuCall(self._group, block)

    def _reduction(self, dtype: str, item_bytes: int, op: ReduceOp) -> CallBlock:
        op.check_dtype(dtype)
        value = self._group.world_size if op.name == "avg" else (op.factor or 0)
        parameter = parameter_for(dtype, value)
        block = CallBlock(
            Collective.ALL_REDUCE,
            all_reduce_loop.address,
            dtype=dtype,
            item_bytes=item_bytes,
            op=op,
            keep=(parameter,),
        )
        block.words[Call.KERNEL] = reduce_kernel(dtype, op.name)
        block.words[Call.PARAMETER] = parameter.ctypes.data
        block.words[Call.PART_BYTES] = item_bytes // parts_per_element(dtype)
        return block

    def broadcast(self, source: Buffer, destination: Buffer, root: int) -> CpuCall:
        """Prepare a broadcast."""
        block = CallBlock(
            Collective.BROADCAST,
            broadcast_loop.address,
            dtype=source.dtype,
            item_bytes=source.item_bytes,
            root=root,
            keep=(source.owner, destination.owner),
        )
        block.set_arrays(source.shape, source.address, destination.address)
        return CpuCall(self._group, block)

    # --- the compiled road -----------------------------------------------------------------------

    def learn(self, dtype: np.dtype[Any], op: object, parsed: ReduceOp) -> None:
        """Make `direct_all_reduce` serve arrays of this dtype object with this op object.

        Both are compared by identity there, so the table keeps them alive. The oldest entry goes
        when the table is full.
        """
        block = self._reduction(dtype.name, dtype.itemsize, parsed)
        block.words[Call.CONTEXT] = self._group.context.ctypes.data
        if isinstance(op, str):
            op = sys.intern(op)
        known = [item for item in self._entries if not (item[0] is dtype and item[1] is op)]
        self._entries = [(dtype, op, block), *known][: entry.MAX_ENTRIES]
        self._table[entry.TABLE_COUNT] = 0
        for place, (dtype_object, op_object, held) in enumerate(self._entries):
            start = entry.TABLE_ENTRIES + place * entry.ENTRY_WORDS
            self._table[start : start + entry.ENTRY_WORDS] = (
                id(dtype_object),
                id(op_object),
                held.words.ctypes.data,
            )
        self._table[entry.TABLE_COUNT] = len(self._entries)

    # --- the rest --------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array in this rank's arena."""
        kind = np.dtype(dtype)
        check_dtype(kind, "empty")
        return self._group.members.arena.array(shape, kind)

    def last_path(self) -> Path:
        """Return which way this rank's last call took."""
        return Path(int(self._group.path))

    def describe(self) -> dict[str, str]:
        """Return the agreed thresholds, in words."""
        tuning = self._group.members.tuning
        return {
            "small private arrays": f"one-shot, up to {tuning.one_shot_bytes} bytes",
            "larger private arrays": f"staged, in chunks of {tuning.chunk_bytes} bytes",
            "arrays of comm.empty": f"symmetric, from {tuning.symmetric_min_bytes} bytes",
        }


def create(group: HostGroup) -> CpuBackend:
    """Return this backend for a group."""
    return CpuBackend(group)
