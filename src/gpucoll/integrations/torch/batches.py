"""Messages of GPU tensors in `batch_isend_irecv`, which start together.

torch.distributed tells a group that a batch begins only if the group is of its own class. To any
other group it sends single messages. On a GPU these run one after the other, so that two ranks
which both send first would wait for each other. So a group looks whether its caller is
`batch_isend_irecv`, and starts the messages with the last one.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType

import torch.distributed as dist

from gpucoll import Communicator
from gpucoll.integrations.torch.works import Started

BATCHED = {"cuda"}
"""The types of devices whose messages start together. Those of CPU tensors start at once, because
started messages of CPU tensors never wait for each other."""
_BATCH = inspect.unwrap(dist.distributed_c10d.batch_isend_irecv).__code__
_MOST_FRAMES = 32
"""How many callers are looked at: each mode of `__torch_function__` adds three between the two."""


class _Batch:
    """The messages of one call of `batch_isend_irecv`."""

    def __init__(self, frame: FrameType) -> None:
        self.frame = frame
        operations = frame.f_locals["p2p_op_list"]
        self.n_missing = sum(each.tensor.device.type in BATCHED for each in operations)
        self.calls: list[tuple[Callable[[], Started], list[Started]]] = []


class Batches:
    """The batch that each thread is making.

    Parameters
    ----------
    comm : Communicator
        The communicator of the group.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._local = threading.local()

    def begin(self, call: Callable[[], Started]) -> Sequence[Started]:
        """Start a message; return a sequence with its work.

        In a batch, the sequence is empty until the last message starts all of them.
        """
        frame = _frame_of_batch()
        if frame is None:
            self._local.batch = None  # a batch that ended with an error keeps its callers' locals
            return (call(),)
        batch: _Batch | None = getattr(self._local, "batch", None)
        if batch is None or batch.frame is not frame:  # an earlier one ended with an error
            batch = self._local.batch = _Batch(frame)
        works: list[Started] = []
        batch.calls.append((call, works))
        batch.n_missing -= 1
        if batch.n_missing == 0:
            self._local.batch = None
            with self._comm.group(async_op=True):
                for each, its_works in batch.calls:
                    its_works.append(each())
        return works


def _frame_of_batch() -> FrameType | None:
    """Return the frame of the `batch_isend_irecv` that called; None if nobody did."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame is None or frame.f_code is _BATCH:
            return frame
        frame = frame.f_back
    return None
