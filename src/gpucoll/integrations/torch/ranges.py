"""Ranges of a group's calls in torch.profiler, as the calls of gloo and NCCL have them.

A call has two: ``c10d::allreduce_`` lasts until the call returns, ``gpucoll:all_reduce`` until it
is done. Methods look at `profiler._is_profiler_enabled` first, which takes 12 ns.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler

from gpucoll.integrations.torch.completion import call_after

if TYPE_CHECKING:
    from gpucoll.integrations.torch.calls import Calls
    from gpucoll.integrations.torch.works import Started

__all__ = ["method_of_caller", "within_ranges"]

_OF_METHODS = {
    "allreduce": ("allreduce_", "allreduce", "all_reduce"),
    "allreduce_coalesced": ("allreduce_coalesced_", "allreduce_coalesced", "all_reduce"),
    "reduce": ("reduce_", "reduce", "reduce"),
    "reduce_scatter": ("reduce_scatter_", "reduce_scatter", "reduce_scatter"),
    "reduce_scatter_single": ("_reduce_scatter_base_", "_reduce_scatter_base", "reduce_scatter"),
    "broadcast": ("broadcast_", "broadcast", "broadcast"),
    "allgather": ("allgather_", "all_gather", "all_gather"),
    "all_gather_single": ("_allgather_base_", "_allgather_base", "all_gather"),
    "barrier": ("barrier", "barrier", "barrier"),
    "gather": ("gather_", "gather", "gather"),
    "scatter": ("scatter_", "scatter", "scatter"),
    "alltoall": ("alltoall_", "all_to_all", "all_to_all"),
    "all_to_all_single": ("alltoall_base_", "all_to_allv", "all_to_all"),
    "send": ("send", "send", "send"),
    "recv": ("recv_", "recv", "recv"),
}
"""By method of the group: torch's operator, the name that torch's NCCL backend notes, gpucoll's."""
_enter = torch.ops.profiler._record_function_enter_new.default
_exit = torch.ops.profiler._record_function_exit._RecordFunction
_end_with = torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction


def method_of_caller() -> str:
    """Return the method that has called the function from which this one is called."""
    return sys._getframe(2).f_code.co_name


def within_ranges(
    call: Callable[..., Any],
    group: Calls,
    method: str,
    inputs: object,
    outputs: Sequence[torch.Tensor],
) -> Callable[..., Any]:
    """Return a function that makes a call of a group's method within ranges.

    Parameters
    ----------
    call : callable
        Makes the call, or starts it and returns its work.
    inputs : tensor, list of tensors or None
        With ``record_shapes=True``, torch's range has their shapes, numbers of elements, the dtype
        and the group, by the names that NCCL's ranges have.
    """
    operator, collective, own = _OF_METHODS[method]
    given = [inputs] if isinstance(inputs, torch.Tensor) else list(_listed(inputs))
    sample = (*given, *outputs)[:1]
    facts: dict[str, Any] = {
        "Collective name": collective,
        "In msg nelems": sum(x.numel() for x in given),
        "Out msg nelems": sum(x.numel() for x in outputs),
        "In msg bytes": sum(x.nbytes for x in given),
        "dtype": str(sample[0].dtype).removeprefix("torch.") if sample else "",
        "Process Group Name": group.getGroupName(),
        "Process Group Description": group.getGroupDesc(),
        "Group size": group.comm.world_size,
    }

    def make(*arguments: object, **named: object) -> object:
        with _RecordFunctionFast(f"c10d::{operator}", given, facts):
            record = _enter(f"gpucoll:{own}", None)
            done: Any = None
            try:
                done = call(*arguments, **named)
            finally:
                if hasattr(done, "add_done_callback"):
                    _running.add(record, done)
                else:
                    _exit(record)
            return done

    return make


def _listed(inputs: object) -> Sequence[torch.Tensor]:
    return inputs if isinstance(inputs, list | tuple) else ()


class _Running:
    """Ranges of works that have not ended.

    torch writes to memory that it has freed if a range ends after its profiler was disabled. So
    what has not ended by then ends then.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a garbage collection within may end further works
        self._open: dict[int, torch.futures.Future[None]] = {}
        self._n_added = 0

    def add(self, record: object, work: Started) -> None:
        """End a range when a work ends, in the thread that notices it."""
        future: torch.futures.Future[None] = torch.futures.Future()
        _end_with(record, future)
        with self._lock:
            if not self._n_added:
                self._end_before_a_profiler()
            self._n_added += 1
            number = self._n_added
            self._open[number] = future
        call_after((work,), lambda: self._end(number))

    def _end(self, number: int) -> None:
        with self._lock:  # a profiler that stops now waits until torch has noted the end
            future = self._open.pop(number, None)
            if future is not None:
                future.set_result(None)

    def _end_before_a_profiler(self) -> None:
        """Let torch end open ranges before it disables a profiler, for which it has no hook."""
        disable = profiler._disable_profiler

        def end_and_disable() -> object:
            for number in list(self._open):
                self._end(number)
            return disable()

        profiler._disable_profiler = end_and_disable


_running = _Running()
