"""Convert torch's tensors, whatever their shapes, into the flat rows that gpucoll's calls take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from gpucoll.integrations.torch.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from gpucoll import ReduceOp

_PACKED_BYTES = 1 << 20
"""Lists up to this size are packed: copying 1 MiB takes less time than passing a list's
addresses."""
Fill = Callable[[], None]

_BYTES = {
    getattr(torch, name): view
    for names, view in (
        ("float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2", torch.uint8),
        ("bits8 bits1x8 bits2x4 bits4x2", torch.uint8),
        ("bits16", torch.int16),
    )
    for name in names.split()
    if hasattr(torch, name)
}
"""dtypes that gpucoll does not know by name, and the dtypes as which their elements are moved."""
_NOT_OF_PAIRS = ("prod", "min", "max")
"""Reductions whose result on complex numbers is not that on their real and imaginary parts."""


def moved(x: torch.Tensor) -> torch.Tensor:
    """Return a view that autograd does not track, with a dtype that gpucoll can move."""
    _check(x)
    if x.requires_grad:
        x = x.detach()
    if x.dtype == torch.complex32:
        return torch.view_as_real(x)
    as_bytes = _BYTES.get(x.dtype)
    return x if as_bytes is None else x.view(as_bytes)


def reduced(x: torch.Tensor, operation: str | ReduceOp) -> torch.Tensor:
    """Return a view that autograd does not track, with a dtype that gpucoll can reduce.

    Raises
    ------
    ArgumentTypeError
        `operation` on complex numbers is not the same as on pairs of real numbers.
    """
    _check(x)
    if x.requires_grad:
        x = x.detach()
    if x.dtype != torch.complex32:
        return x
    if operation in _NOT_OF_PAIRS:
        raise ArgumentTypeError(
            f"{operation} is not supported for complex32: use sum or avg, or pass "
            "x.to(torch.complex64)"
        )
    return torch.view_as_real(x)


def flat_input(x: torch.Tensor) -> torch.Tensor:
    """Return the elements in one row: a view, or a copy of a tensor that is not contiguous."""
    return x.reshape(-1)


def row_in_place(x: torch.Tensor) -> torch.Tensor | None:
    """Return the elements in one row over the same memory; None if there is no such view."""
    try:
        return x if x.dim() == 1 else x.view(-1)
    except (AttributeError, RuntimeError):  # not a tensor, or one that is sparse or not contiguous
        return None


class Outputs:
    """The tensors that a call writes, each as one row.

    A call cannot write to a tensor that is not contiguous. It writes to a temporary instead, which
    is copied to the tensor when the call has ended.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def flat(self, out: torch.Tensor) -> torch.Tensor:
        """Return the row to which the call writes the contents of `out`."""
        if out.is_contiguous():
            return out.view(-1)
        temporary = torch.empty_like(out, memory_format=torch.contiguous_format)
        self._copies.append((out, temporary))
        return temporary.view(-1)

    def row(self, x: torch.Tensor) -> torch.Tensor:
        """Return the elements of `x` in one row, which a call reads and writes in place.

        Ranks may pass tensors of different shapes if their numbers of elements are equal.
        """
        if x.is_contiguous():
            return x.view(-1)
        temporary = x.contiguous()
        self._copies.append((x, temporary))
        return temporary.view(-1)

    def together(self, outs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
        """Return one tensor to write for all of these, and the number of elements of each."""
        counts = [out.numel() for out in outs]
        whole = torch.empty(sum(counts), dtype=outs[0].dtype, device=outs[0].device)
        for out, part in zip(outs, whole.split(counts), strict=True):
            self._copies.append((out, part.view(out.shape)))
        return whole, counts

    @property
    def fill(self) -> Fill | None:
        """The function to call when the call has ended; None if there is nothing to copy."""
        return self._copy if self._copies else None

    def _copy(self) -> None:
        with torch.no_grad():
            for out, temporary in self._copies:
                out.copy_(temporary)
                # the current stream may not be the one that the tensors were made on
                if out.is_cuda:
                    stream = torch.cuda.current_stream(out.device)
                    out.record_stream(stream)
                    temporary.record_stream(stream)


def packs(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether to pass a list as one tensor: on GPUs, whose calls take one, and if small.

    The calls read and write larger lists where they are; passing the addresses takes 100 us.
    """
    return bool(tensors[0].is_cuda or sum(x.nbytes for x in tensors) <= _PACKED_BYTES)


def packed(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """Return the elements of all tensors in one row, and the number of elements of each."""
    rows = [x.reshape(-1) for x in tensors]
    return torch.cat(rows), [row.numel() for row in rows]


def one(tensors: Sequence[torch.Tensor] | torch.Tensor, call: str) -> torch.Tensor:
    """Return the only tensor of a list. torch's calls take lists; gpucoll supports one tensor.

    Raises
    ------
    ArgumentError
        The list is empty or has several tensors.
    """
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ArgumentError(
            f"{call} takes one tensor for each rank; got a list of {len(tensors)}. For several "
            "tensors use the coalesced form or several calls"
        )
    return tensors[0]


def check_alike(call: str, *groups: Sequence[torch.Tensor]) -> None:
    """Raise if tensors of one call differ in device or dtype."""
    first: torch.Tensor | None = None
    for tensors in groups:
        for x in tensors:
            if first is None:
                first = x
            elif x.device != first.device or x.dtype != first.dtype:
                raise ArgumentError(
                    f"{call}: all tensors of a call must be on one device and of one dtype; got "
                    f"{first.dtype} on {first.device} and {x.dtype} on {x.device}"
                )


def _check(x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise ArgumentTypeError(
            f"expected a torch tensor; got {type(x).__module__}.{type(x).__qualname__}"
        )
    if x.layout != torch.strided:
        raise ArgumentTypeError(
            f"tensors of layout {x.layout} are supported only by all_reduce with SUM (COO): for "
            "any other call pass x.to_dense()"
        )
