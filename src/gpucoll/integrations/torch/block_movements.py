"""Movements of a process group in which each rank sends or receives a block of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch._C._distributed_c10d as c10d
from torch.autograd import profiler

from gpucoll import GpucollError, StateError
from gpucoll.integrations.torch.calls import DONE, AnyOptions, Calls, Lists, Tensors
from gpucoll.integrations.torch.errors import ArgumentError, as_torchs
from gpucoll.integrations.torch.ranges import method_of_caller, within_ranges
from gpucoll.integrations.torch.tensors import (
    Outputs,
    check_alike,
    flat_input,
    moved,
    one,
    packed,
    packs,
)
from gpucoll.integrations.torch.works import Work

if TYPE_CHECKING:
    import datetime


class BlockMovements(Calls):
    """gather, scatter and all_to_all."""

    def gather(
        self,
        outputs: Lists,
        inputs: Tensors | torch.Tensor,
        opts: AnyOptions = None,
        *,
        root: int | None = None,
        timeout: datetime.timedelta | None = None,
    ) -> Work:
        """Gather every rank's tensor into a list of the root's."""
        x = one(inputs, "gather")
        root, is_async, limit_s = self._rooted(opts, c10d.GatherOptions, root, timeout)
        mine, call = flat_input(moved(x)), self.comm.gather
        if root != self.comm.rank:
            return self._run(is_async, limit_s, [], call, mine, root)
        blocks = self._blocks("gather", "output", outputs)
        check_alike("gather", blocks, [x])
        self._check_alike_sizes("gather", x, blocks)
        written = Outputs()
        shown = [moved(block) for block in blocks]
        out: Any
        if packs(shown):
            out, _ = written.together(shown)
        else:
            out = [written.flat(block) for block in shown]
        return self._run(is_async, limit_s, blocks, call, mine, root, out=out, written=written)

    def scatter(
        self,
        outputs: Tensors | torch.Tensor,
        inputs: Lists,
        opts: AnyOptions = None,
        *,
        root: int | None = None,
        timeout: datetime.timedelta | None = None,
    ) -> Work:
        """Give each rank a block of the root's list."""
        out = one(outputs, "scatter")
        root, is_async, limit_s = self._rooted(opts, c10d.ScatterOptions, root, timeout)
        written = Outputs()
        target = written.flat(moved(out))
        x: Any = None
        if root == self.comm.rank:
            blocks = self._blocks("scatter", "input", inputs)
            check_alike("scatter", blocks, [out])
            self._check_alike_sizes("scatter", out, blocks)
            shown = [moved(block) for block in blocks]
            x = packed(shown)[0] if packs(shown) else [flat_input(block) for block in shown]
        return self._run(
            is_async, limit_s, [out], self.comm.scatter, x, root, out=target, written=written
        )

    def alltoall(
        self,
        outputs: Tensors,
        inputs: Tensors,
        opts: AnyOptions = None,
        *,
        timeout: datetime.timedelta | None = None,
    ) -> Work:
        """Give block s of the list to rank s."""
        outputs = self._blocks("all_to_all", "output", outputs)
        inputs = self._blocks("all_to_all", "input", inputs)
        check_alike("all_to_all", outputs, inputs)
        is_async, limit_s = self._timing(opts, c10d.AllToAllOptions, timeout)
        call, written = self.comm.all_to_all, Outputs()
        shown, mine = [moved(x) for x in outputs], [moved(x) for x in inputs]
        if not (packs(shown) and packs(mine)):
            rows, sent = [written.flat(x) for x in shown], [flat_input(x) for x in mine]
            return self._run(is_async, limit_s, outputs, call, sent, out=rows, written=written)
        send_counts, recv_counts = [x.numel() for x in mine], [x.numel() for x in shown]
        if self._was_exchanged(is_async, limit_s, mine, shown, send_counts, recv_counts):
            return DONE
        x, _ = packed(mine)
        out, _ = written.together(shown)
        given = {"send_counts": send_counts, "recv_counts": recv_counts}
        return self._run(is_async, limit_s, outputs, call, x, out=out, written=written, **given)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: AnyOptions = None,
        *,
        timeout: datetime.timedelta | None = None,
    ) -> Work:
        """Send rows of one tensor to the ranks, split by row counts or into equal parts."""
        is_async, limit_s = self._timing(opts, c10d.AllToAllOptions, timeout)
        check_alike("all_to_all_single", [output], [input])
        written = Outputs()
        target = written.flat(moved(output))
        x, call = flat_input(moved(input)), self.comm.all_to_all
        given: dict[str, Any] = {}
        if len(output_split_sizes) or len(input_split_sizes):
            given["send_counts"] = self._counts("input", input, x, input_split_sizes)
            given["recv_counts"] = self._counts("output", output, target, output_split_sizes)
            if packs([x]) and packs([target]) and written.fill is None:
                counts = given["send_counts"], given["recv_counts"]
                if self._was_exchanged(is_async, limit_s, [x], [target], *counts):
                    return DONE
        return self._run(is_async, limit_s, [output], call, x, out=target, written=written, **given)

    def _was_exchanged(
        self,
        is_async: bool,
        limit_s: float | None,
        inputs: Tensors,
        outputs: Tensors,
        send_counts: list[int],
        recv_counts: list[int],
    ) -> bool:
        """Exchange small tensors with a plan, if one fits; return whether this was done."""
        if is_async or limit_s is not None or inputs[0].is_cuda or self._together is not None:
            return False
        around = None
        if profiler._is_profiler_enabled:
            method = method_of_caller()
            around = partial(
                within_ranges, group=self, method=method, inputs=inputs, outputs=outputs
            )
        try:
            return self._exchanges.run(inputs, outputs, send_counts, recv_counts, around)
        except StateError:
            if self.comm.is_closed:
                raise
            return False  # another thread is in a call: queue behind it
        except GpucollError as error:
            raise as_torchs(error) from None

    def _check_alike_sizes(self, call: str, x: torch.Tensor, blocks: Tensors) -> None:
        if any(block.numel() != x.numel() for block in blocks):
            raise ArgumentError(
                f"rank {self.comm.rank} of {self.comm.world_size}: {call} needs tensors of equal "
                f"size; got {x.numel()} elements here and {[b.numel() for b in blocks]} in the list"
            )

    def _counts(
        self, which: str, x: torch.Tensor, flat: torch.Tensor, splits: Sequence[int]
    ) -> list[int]:
        """Convert numbers of rows per rank into numbers of elements per rank."""
        world_size = self.comm.world_size
        rows = x.shape[0] if x.dim() else 1
        if not len(splits):
            if rows % world_size:
                raise ArgumentError(
                    f"all_to_all_single: {rows} rows of {which} cannot be divided equally among "
                    f"{world_size} ranks: give {which}_split_sizes"
                )
            splits = [rows // world_size] * world_size
        if len(splits) != world_size or sum(splits) != rows or min(splits) < 0:
            raise ArgumentError(
                f"all_to_all_single: {which}_split_sizes must be {world_size} numbers of rows "
                f"whose sum is {rows}; got {list(splits)}"
            )
        row_elements = flat.numel() // rows if rows else 0
        return [split * row_elements for split in splits]

    # The names of these in earlier versions of torch.
    alltoall_base = all_to_all_single
