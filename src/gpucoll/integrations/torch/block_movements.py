"""Movements of a process group whose blocks go to, or come from, one rank each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch._C._distributed_c10d as c10d

from gpucoll.integrations.torch.calls import Calls, Tensors
from gpucoll.integrations.torch.errors import ArgumentError
from gpucoll.integrations.torch.tensors import Outputs, Split, check_alike, flat_input, moved, one
from gpucoll.integrations.torch.works import Work


class BlockMovements(Calls):
    """gather, scatter and all_to_all."""

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, *, root: Any = None, timeout: Any = None
    ) -> Work:
        """Gather every rank's tensor into a list of the root's."""
        x = one(inputs, "gather")
        if isinstance(opts, c10d.GatherOptions):
            root, is_async, limit_s = opts.rootRank, opts.asyncOp, self._limit(opts.timeout)
        else:
            root = opts if root is None else root
            is_async, limit_s = True, self._limit(timeout)
        mine, call = flat_input(moved(x)), self.comm.gather
        if root != self.comm.rank:
            return self._run(is_async, limit_s, [], call, mine, root)
        blocks = self._blocks("gather", "output", outputs)
        check_alike("gather", blocks, [x])
        self._check_alike_sizes("gather", x, blocks)
        written = Outputs()
        rows = [written.flat(moved(block)) for block in blocks]
        if x.is_cuda:
            out = torch.empty(len(rows) * mine.numel(), dtype=mine.dtype, device=mine.device)
            copy = Split(out, rows, written)
            return self._run(is_async, limit_s, blocks, call, mine, root, out=out, fill=copy)
        return self._run(is_async, limit_s, blocks, call, mine, root, out=rows, fill=written)

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, *, root: Any = None, timeout: Any = None
    ) -> Work:
        """Give each rank a block of the root's list."""
        out = one(outputs, "scatter")
        if isinstance(opts, c10d.ScatterOptions):
            root, is_async, limit_s = opts.rootRank, opts.asyncOp, self._limit(opts.timeout)
        else:
            root = opts if root is None else root
            is_async, limit_s = True, self._limit(timeout)
        written = Outputs()
        target = written.flat(moved(out))
        x: Any = None
        if root == self.comm.rank:
            blocks = self._blocks("scatter", "input", inputs)
            check_alike("scatter", blocks, [out])
            self._check_alike_sizes("scatter", out, blocks)
            x = self._joined([flat_input(moved(block)) for block in blocks])
        return self._run(
            is_async, limit_s, [out], self.comm.scatter, x, root, out=target, fill=written
        )

    def alltoall(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, *, timeout: Any = None
    ) -> Work:
        """Give block s of the list to rank s."""
        outputs = self._blocks("all_to_all", "output", outputs)
        inputs = self._blocks("all_to_all", "input", inputs)
        check_alike("all_to_all", outputs, inputs)
        is_async, limit_s = self._timing(opts, c10d.AllToAllOptions, timeout)
        written = Outputs()
        rows = [written.flat(moved(x)) for x in outputs]
        mine, call = [flat_input(moved(x)) for x in inputs], self.comm.all_to_all
        if not outputs[0].is_cuda:
            return self._run(is_async, limit_s, outputs, call, mine, out=rows, fill=written)
        sent, received = [x.numel() for x in mine], [x.numel() for x in rows]
        out = torch.empty(sum(received), dtype=rows[0].dtype, device=rows[0].device)
        given = {"send_counts": sent, "recv_counts": received}
        copy = Split(out, rows, written)
        x = torch.cat(mine)
        return self._run(is_async, limit_s, outputs, call, x, out=out, fill=copy, **given)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        *,
        timeout: Any = None,
    ) -> Work:
        """Give rows of one tensor to the ranks, by their numbers or in equal parts."""
        is_async, limit_s = self._timing(opts, c10d.AllToAllOptions, timeout)
        check_alike("all_to_all_single", [output], [input])
        written = Outputs()
        target = written.flat(moved(output))
        x, call = flat_input(moved(input)), self.comm.all_to_all
        given: dict[str, Any] = {}
        if len(output_split_sizes) or len(input_split_sizes):
            given["send_counts"] = self._counts("input", input, x, input_split_sizes)
            given["recv_counts"] = self._counts("output", output, target, output_split_sizes)
        return self._run(is_async, limit_s, [output], call, x, out=target, fill=written, **given)

    def _check_alike_sizes(self, call: str, x: torch.Tensor, blocks: Tensors) -> None:
        if any(block.numel() != x.numel() for block in blocks):
            raise ArgumentError(
                f"rank {self.comm.rank} of {self.comm.world_size}: {call} needs tensors of equal "
                f"size; got {x.numel()} elements here and {[b.numel() for b in blocks]} in the list"
            )

    def _counts(
        self, which: str, x: torch.Tensor, flat: torch.Tensor, splits: Sequence[int]
    ) -> list[int]:
        """Return elements for each rank from rows for each rank."""
        world_size = self.comm.world_size
        rows = x.shape[0] if x.dim() else 1
        if not len(splits):
            if rows % world_size:
                raise ArgumentError(
                    f"all_to_all_single: {rows} rows of {which} cannot be parted equally among "
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

    # What earlier versions of torch call it.
    alltoall_base = all_to_all_single
