"""Call blocks: one prepared call, as compiled code reads it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpucoll.collectives import NO_ROOT, Collective
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.words import Call
from gpucoll.types import ReduceOp, digest_of, dtype_code, mix_digest


class CallBlock:
    """The words of one call, and the objects that must live as long as they are used.

    Parameters
    ----------
    collective : Collective
        The collective that is called.
    loop : int
        Address of its compiled loop.
    dtype : str
        Name of the elements' dtype; empty if there is none.
    item_bytes : int
        Bytes of an element.
    op, root
        The op and root, as part of the signature, if the collective has them.
    keep : tuple of object
        Objects that must live as long as the block.
    """

    def __init__(
        self,
        collective: Collective,
        loop: int,
        *,
        dtype: str = "",
        item_bytes: int = 1,
        op: ReduceOp | None = None,
        root: int = NO_ROOT,
        keep: tuple[Any, ...] = (),
    ) -> None:
        self.words = np.zeros(Call.n_words, np.int64)
        self.keep = keep
        words = self.words
        words[Call.loop] = loop
        words[Call.item_bytes] = item_bytes
        words[Call.part_bytes] = item_bytes
        words[Call.source_parts] = words[Call.destination_parts] = words[Call.largest_parts] = 1
        self.set_call(collective, dtype, op, root, op.parameter_bits if op else 0)

    def set_call(
        self, collective: Collective, dtype: str, op: ReduceOp | None, root: int, parameter: int
    ) -> None:
        """Set what is called: the fields that ranks compare first, and that errors show."""
        words = self.words
        words[Call.collective] = collective
        words[Call.operation] = op.code if op else 0
        words[Call.dtype] = dtype_code(dtype) if dtype else -1
        words[Call.root] = words[Call.shown_root] = root
        words[Call.parameter_bits] = parameter
        words[Call.base_digest] = digest_of(
            tuple(
                int(words[field])
                for field in (
                    Call.collective,
                    Call.operation,
                    Call.dtype,
                    Call.root,
                    Call.parameter_bits,
                )
            )
        )

    def sign(self, *numbers: int) -> None:
        """Add these numbers, on which all ranks must agree, to the signature."""
        digest = int(self.words[Call.base_digest])
        for number in numbers:
            digest = mix_digest(digest, number)
        self.words[Call.digest] = digest

    def sign_list(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Add the shapes of a list of arrays to the signature, as `gpucoll.entries.lists` does."""
        numbers = (number for shape in shapes for number in (len(shape), *shape))
        self.sign(len(shapes), *numbers)
        count = sum(map(math.prod, shapes))
        self.words[Call.count] = count
        is_list = Collective(int(self.words[Call.collective])).is_list
        self.show_shape((len(shapes) if is_list else count,))

    def sign_block(self, count: int) -> None:
        """Add the count of one rank's block to the signature: all that a scatter's ranks know."""
        self.sign(1, count)
        self.show_shape((count,))

    def show_shape(self, shape: tuple[int, ...]) -> None:
        """Set the shape that the call's record shows."""
        words = self.words
        words[Call.n_dimensions] = len(shape)
        shown = shape[: layout.SHOWN_DIMENSIONS]
        words[Call.dimensions : Call.dimensions + len(shown)] = shown

    def set_arrays(
        self, shape: tuple[int, ...], source: int, destination: int, keep: tuple[Any, ...] = ()
    ) -> None:
        """Fill in the input's shape (also as the signature) and the addresses of the data."""
        words = self.words
        count = math.prod(shape)
        words[Call.count] = count
        words[Call.size_bytes] = count * int(words[Call.item_bytes])
        words[Call.source] = source
        words[Call.destination] = destination
        self.sign(len(shape), *shape)
        self.show_shape(shape)
        self.keep = (*self.keep, *keep)

    def set_extents(
        self, reads: Sequence[tuple[int, int]], writes: Sequence[tuple[int, int]]
    ) -> None:
        """Set the address ranges of the inputs and outputs, given as (address, bytes)."""
        for field, areas in ((Call.reads, reads), (Call.writes, writes)):
            self.words[field] = min((start for start, _ in areas), default=0)
            self.words[field + 1] = max((start + size for start, size in areas), default=0)

    def set_table(self, field: int, values: Sequence[int]) -> None:
        """Store numbers for compiled code, and their address in a field."""
        table = np.array(values, np.int64)
        self.words[field] = table.ctypes.data
        self.keep = (*self.keep, table)
