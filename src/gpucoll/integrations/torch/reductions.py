"""Reductions of a process group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch._C._distributed_c10d as c10d
from torch.autograd import profiler

import gpucoll
from gpucoll import Compression, GpucollError, ReduceOp
from gpucoll.integrations.torch import sparse
from gpucoll.integrations.torch.calls import (
    DONE,
    AnyOp,
    AnyOptions,
    Calls,
    Lists,
    Tensors,
    operation_of,
)
from gpucoll.integrations.torch.errors import as_torchs
from gpucoll.integrations.torch.ranges import within_ranges
from gpucoll.integrations.torch.tensors import (
    Outputs,
    check_alike,
    flat_input,
    one,
    packed,
    packs,
    reduced,
    row_in_place,
)
from gpucoll.integrations.torch.works import Finished, Work

if TYPE_CHECKING:
    import datetime


class Reductions(Calls):
    """The calls that reduce over the ranks."""

    def allreduce(
        self,
        tensors: Tensors | torch.Tensor,
        opts: AnyOptions = None,
        *,
        op: AnyOp = None,
        timeout: datetime.timedelta | None = None,
    ) -> Work:
        """Reduce one tensor in place."""
        x = tensors[0] if type(tensors) is list and len(tensors) == 1 else one(tensors, "allreduce")
        if isinstance(opts, c10d.AllreduceOptions):
            operation, is_async, limit_s = self._read(opts)
        else:
            operation = operation_of(op if opts is None else opts)
            is_async, limit_s = True, self._limit(timeout)
        at_once = self._compression is None and not is_async and self._together is None
        if (row := row_in_place(x) if at_once else None) is not None:
            call = self.comm.all_reduce
            if profiler._is_profiler_enabled:
                call = within_ranges(call, self, "allreduce", x, [x])
            try:
                call(row, operation, out=row, timeout_s=limit_s)
            except gpucoll.UsageError:
                pass  # the general path explains the failure, or makes the call
            except GpucollError as error:
                raise as_torchs(error) from None
            else:
                return DONE
        if isinstance(x, torch.Tensor) and x.layout != torch.strided:
            self._plainly(lambda: sparse.all_reduce(self.comm, x, operation))
            return Finished([x])
        written = Outputs()
        shown = written.row(reduced(x, operation))
        more = self._compressing(shown, operation)
        call = self.comm.all_reduce
        return self._run(
            is_async, limit_s, [x], call, shown, operation, out=shown, written=written, **more
        )

    def _compressing(
        self, x: torch.Tensor, operation: str | ReduceOp
    ) -> dict[str, str | Compression]:
        if self._compression is None or operation not in ("sum", "avg"):
            return {}
        if x.dtype != torch.float32 or x.nbytes < self.options.compression_from_bytes:
            return {}
        return {"compression": self._compression}

    def allreduce_coalesced(self, tensors: Tensors, opts: AnyOptions = None) -> Work:
        """Reduce several tensors in place, as one call."""
        check_alike("allreduce_coalesced", tensors)
        operation, is_async, limit_s = self._read(opts, c10d.AllreduceCoalescedOptions)
        written = Outputs()
        shown = [written.row(reduced(x, operation)) for x in tensors]
        if not shown:
            return Finished(tensors)
        call = self.comm.all_reduce
        return self._run(
            is_async, limit_s, tensors, call, shown, operation, out=shown, written=written
        )

    def reduce(
        self,
        tensors: Tensors | torch.Tensor,
        opts: AnyOptions = None,
        *,
        root: int | None = None,
        op: AnyOp = None,
        timeout: datetime.timedelta | None = None,
    ) -> Work:
        """Reduce one tensor to the root; there the result replaces it."""
        x = one(tensors, "reduce")
        if isinstance(opts, c10d.ReduceOptions):
            operation, is_async, limit_s = self._read(opts)
            root = opts.rootRank
        else:
            root = opts if root is None else root
            operation, is_async, limit_s = operation_of(op), True, self._limit(timeout)
        call, written, out = self.comm.reduce, Outputs(), None
        if root == self.comm.rank:
            shown = out = written.row(reduced(x, operation))
        else:
            shown = flat_input(reduced(x, operation))
        return self._run(
            is_async, limit_s, [x], call, shown, operation, root, out=out, written=written
        )

    def reduce_scatter(
        self,
        outputs: Tensors | torch.Tensor,
        inputs: Lists,
        opts: AnyOptions = None,
        *,
        op: AnyOp = None,
        timeout: datetime.timedelta | None = None,
    ) -> Work:
        """Reduce a list of blocks, one for each rank."""
        out = one(outputs, "reduce_scatter")
        blocks = self._blocks("reduce_scatter", "input", inputs)
        check_alike("reduce_scatter", [out], blocks)
        if isinstance(opts, c10d.ReduceScatterOptions):
            operation, is_async, limit_s = self._read(opts)
        else:
            operation = operation_of(op if opts is None else opts)
            is_async, limit_s = True, self._limit(timeout)
        written = Outputs()
        given: dict[str, Any] = {"out": written.flat(reduced(out, operation)), "written": written}
        shown: Any = [reduced(block, operation) for block in blocks]
        if packs(shown):
            shown, counts = packed(shown)
            if len({*counts}) > 1:
                given["counts"] = counts
        else:
            shown = [flat_input(block) for block in shown]
        return self._run(
            is_async, limit_s, [out], self.comm.reduce_scatter, shown, operation, **given
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: AnyOptions = None
    ) -> Work:
        """Reduce one tensor; each rank gets its part of the result."""
        operation, is_async, limit_s = self._read(opts, c10d.ReduceScatterOptions)
        check_alike("reduce_scatter_tensor", [output], [input])
        self._check_size("reduce_scatter_tensor", output, input)
        written = Outputs()
        target = written.flat(reduced(output, operation))
        x = flat_input(reduced(input, operation))
        call = self.comm.reduce_scatter
        return self._run(
            is_async, limit_s, [output], call, x, operation, out=target, written=written
        )

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: AnyOptions = None
    ) -> Work:
        """Reduce several tensors as one call; each rank gets its parts."""
        opts = c10d.ReduceScatterOptions() if opts is None else opts
        return self._each(self.reduce_scatter_single, outputs, inputs, opts)

    # The names of these in earlier versions of torch.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
