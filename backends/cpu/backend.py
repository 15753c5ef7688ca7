"""The CPU backend: call blocks for host buffers, and the compiled road of small messages."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.numpy_arrays import check_dtype, dtype_name
from gpucoll.backends.cpu.all_reduce import all_reduce_loop
from gpucoll.backends.cpu.broadcast import broadcast_loop
from gpucoll.backends.cpu.direct import DirectCalls
from gpucoll.control.call import CallBlock
from gpucoll.control.group import HostGroup
from gpucoll.errors import ArgumentTypeError
from gpucoll.kernels.cpu.reduce import parameter_for, parts_per_element, reduce_kernel
from gpucoll.transport.layout import Call, Path
from gpucoll.types import Collective, ReduceOp

INT8_MAX = 127


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
        self.direct_all_reduce = DirectCalls(group)
        self.direct_broadcast = DirectCalls(group)

    # --- collectives -----------------------------------------------------------------------------

    def all_reduce(self, source: Buffer, destination: Buffer, op: ReduceOp) -> CpuCall:
        """Prepare an all_reduce."""
        block = self._all_reduce_block(source.dtype, source.item_bytes, op)
        return self._with_arrays(block, source, destination)

    def _all_reduce_block(self, dtype: str, item_bytes: int, op: ReduceOp) -> CallBlock:
        op.check_dtype(dtype)
        if op.name == "avg" and item_bytes == 1 and self._group.world_size > INT8_MAX:
            raise ArgumentTypeError(
                f"avg of {dtype} over {self._group.world_size} ranks: the number of ranks does not "
                "fit into the dtype; convert to a wider one first"
            )
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
        block = self._broadcast_block(source.dtype, source.item_bytes, root)
        return self._with_arrays(block, source, destination)

    def _broadcast_block(self, dtype: str, item_bytes: int, root: int) -> CallBlock:
        return CallBlock(
            Collective.BROADCAST,
            broadcast_loop.address,
            dtype=dtype,
            item_bytes=item_bytes,
            root=root,
        )

    def _with_arrays(self, block: CallBlock, source: Buffer, destination: Buffer) -> CpuCall:
        keep = (source.owner, destination.owner)
        block.set_arrays(source.shape, source.address, destination.address, keep)
        return CpuCall(self._group, block)

    # --- the compiled road -----------------------------------------------------------------------

    def learn_all_reduce(self, dtype: np.dtype[Any], key: object, op: ReduceOp) -> None:
        """Make `direct_all_reduce` serve arrays of this dtype with this key, which means `op`."""
        self.direct_all_reduce.learn(
            dtype, key, lambda: self._all_reduce_block(dtype_name(dtype), dtype.itemsize, op)
        )

    def learn_broadcast(self, dtype: np.dtype[Any], root: int) -> None:
        """Make `direct_broadcast` serve arrays of this dtype with this root."""
        self.direct_broadcast.learn(
            dtype, root, lambda: self._broadcast_block(dtype_name(dtype), dtype.itemsize, root)
        )

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
