"""Movements of a process group that bring every rank's data to all ranks, and barriers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch._C._distributed_c10d as c10d

from gpucoll.integrations.torch.calls import AnyOptions, Calls, Lists, Tensors
from gpucoll.integrations.torch.errors import ArgumentError, DeadlineError
from gpucoll.integrations.torch.tensors import Outputs, check_alike, flat_input, moved, one, packs
from gpucoll.integrations.torch.works import Work

if TYPE_CHECKING:
    import datetime

_PAUSES_S = (20e-6, 1e-3)
"""First and longest pause between two queries of a stream, in seconds."""


class Movements(Calls):
    """The calls that move tensors to every rank."""

    def broadcast(
        self,
        tensors: Tensors | torch.Tensor,
        opts: AnyOptions = None,
        *,
        root: int | None = None,
        timeout: datetime.timedelta | None = None,
    ) -> Work:
        """Copy the root's tensor to all ranks."""
        x = one(tensors, "broadcast")
        root, is_async, limit_s = self._rooted(opts, c10d.BroadcastOptions, root, timeout)
        call, written = self.comm.broadcast, Outputs()
        shown = written.row(moved(x))
        return self._run(is_async, limit_s, [x], call, shown, root, out=shown, written=written)

    def allgather(
        self,
        outputs: Lists,
        inputs: Tensors | torch.Tensor,
        opts: AnyOptions = None,
        *,
        timeout: datetime.timedelta | None = None,
    ) -> Work:
        """Gather every rank's tensor into a list of tensors."""
        x = one(inputs, "allgather")
        blocks = self._blocks("all_gather", "output", outputs)
        check_alike("all_gather", blocks, [x])
        is_async, limit_s = self._timing(opts, c10d.AllgatherOptions, timeout)
        call, mine, written = self.comm.all_gather, flat_input(moved(x)), Outputs()
        shown = [moved(block) for block in blocks]
        given: dict[str, Any] = {}
        if packs(shown):
            given["out"], counts = written.together(shown)
            if len({*counts}) > 1:
                given["counts"] = counts
        else:
            given["out"] = [written.flat(block) for block in shown]
        return self._run(is_async, limit_s, blocks, call, mine, written=written, **given)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: AnyOptions = None
    ) -> Work:
        """Gather every rank's tensor into one."""
        is_async, limit_s = self._timing(opts, c10d.AllgatherOptions)
        check_alike("all_gather_into_tensor", [output], [input])
        self._check_size("all_gather_into_tensor", input, output)
        written = Outputs()
        target = written.flat(moved(output))
        call, mine = self.comm.all_gather, flat_input(moved(input))
        return self._run(is_async, limit_s, [output], call, mine, out=target, written=written)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: AnyOptions = None
    ) -> Work:
        """Gather several tensors of every rank, each into one tensor, as one call."""
        return self._each(self.all_gather_single, outputs, inputs, opts)

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: AnyOptions = None
    ) -> Work:
        """Gather several tensors of every rank, into one list for each rank."""
        if len(outputs) != self.comm.world_size or any(len(x) != len(inputs) for x in outputs):
            raise ArgumentError(
                f"all_gather_coalesced needs a list of {len(inputs)} tensors for each of "
                f"{self.comm.world_size} ranks; got lists of {[len(x) for x in outputs]}"
            )
        works = [
            self.allgather([[one[place] for one in outputs]], [x], opts)
            for place, x in enumerate(inputs)
        ]
        return self._as_one(works, [x for row in outputs for x in row])

    def barrier(
        self, opts: AnyOptions = None, *, timeout: datetime.timedelta | None = None
    ) -> Work:
        """Wait until every rank has called it. On a GPU, first wait for the current stream."""
        is_async, limit_s = self._timing(opts, c10d.BarrierOptions, timeout)
        device = getattr(opts, "device", None)
        if device is not None and device.type == "cuda":
            limit_s = self._await_stream(device, limit_s)
        x = torch.zeros(1, dtype=torch.uint8)
        return self._run(is_async, limit_s, [x], self.comm.all_reduce, x, "max", out=x)

    def _await_stream(self, device: torch.device, limit_s: float | None) -> float:
        """Wait for the work on the current stream; return how many seconds of the limit are left.

        Raises
        ------
        DeadlineError
            The work does not end in time. The communicator is aborted, as other ranks wait in the
            barrier.
        """
        limit_s = self.comm._group.timeout_s if limit_s is None else limit_s
        event, due_s = torch.cuda.current_stream(device).record_event(), time.monotonic() + limit_s
        pause_s = _PAUSES_S[0]
        while not event.query():
            if (left_s := due_s - time.monotonic()) <= 0:
                error = DeadlineError(
                    f"Reached the timeout of a wait: rank {self.comm.rank} of "
                    f"{self.comm.world_size} waited {limit_s:g} s in barrier for what is on its "
                    f"current stream of {device}. The communicator is broken: close it"
                )
                self.comm._group.note_exception(error)
                self.comm.abort()
                raise error
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _PAUSES_S[1])
        return max(due_s - time.monotonic(), pause_s)

    # The names of these in earlier versions of torch.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
