"""Call blocks: one prepared call, as compiled code reads it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpucoll.transport.shared import layout
from gpucoll.transport.shared.words import CALL_WORDS, Call
from gpucoll.types import NO_ROOT, Collective, ReduceOp, digest_of, dtype_code, mix_digest


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
        self.words = np.zeros(CALL_WORDS, np.int64)
        self.keep = keep
        words = self.words
        words[Call.LOOP] = loop
        words[Call.ITEM_BYTES] = item_bytes
        words[Call.PART_BYTES] = item_bytes
        words[Call.SOURCE_PARTS] = words[Call.DESTINATION_PARTS] = words[Call.LARGEST_PARTS] = 1
        self.set_call(collective, dtype, op, root, op.parameter_bits if op else 0)

    def set_call(
        self, collective: Collective, dtype: str, op: ReduceOp | None, root: int, parameter: int
    ) -> None:
        """Set what is called: the fields that ranks compare first, and that errors show."""
        words = self.words
        words[Call.COLLECTIVE] = collective
        words[Call.OPERATION] = op.code if op else 0
        words[Call.DTYPE] = dtype_code(dtype) if dtype else -1
        words[Call.ROOT] = words[Call.SHOWN_ROOT] = root
        words[Call.PARAMETER_BITS] = parameter
        words[Call.BASE_DIGEST] = digest_of(
            tuple(
                int(words[field])
                for field in (
                    Call.COLLECTIVE,
                    Call.OPERATION,
                    Call.DTYPE,
                    Call.ROOT,
                    Call.PARAMETER_BITS,
                )
            )
        )

    def sign(self, *numbers: int) -> None:
        """Add these numbers, on which all ranks must agree, to the signature."""
        digest = int(self.words[Call.BASE_DIGEST])
        for number in numbers:
            digest = mix_digest(digest, number)
        self.words[Call.DIGEST] = digest

    def sign_list(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Add the shapes of a list of arrays to the signature, as `gpucoll.entries.lists` does."""
        numbers = (number for shape in shapes for number in (len(shape), *shape))
        self.sign(len(shapes), *numbers)
        count = sum(map(math.prod, shapes))
        self.words[Call.COUNT] = count
        is_list = int(self.words[Call.COLLECTIVE]) == Collective.ALL_REDUCE_LIST
        self.show_shape((len(shapes) if is_list else count,))

    def sign_block(self, count: int) -> None:
        """Add the count of one rank's block to the signature: all that a scatter's ranks know."""
        self.sign(1, count)
        self.show_shape((count,))

    def show_shape(self, shape: tuple[int, ...]) -> None:
        """Set the shape that the call's record shows."""
        words = self.words
        words[Call.DIMENSIONS] = len(shape)
        shown = shape[: layout.SHOWN_DIMENSIONS]
        words[Call.DIMENSION : Call.DIMENSION + len(shown)] = shown

    def set_arrays(
        self, shape: tuple[int, ...], source: int, destination: int, keep: tuple[Any, ...] = ()
    ) -> None:
        """Fill in the input's shape (also as the signature) and the addresses of the data."""
        words = self.words
        count = math.prod(shape)
        words[Call.COUNT] = count
        words[Call.SIZE_BYTES] = count * int(words[Call.ITEM_BYTES])
        words[Call.SOURCE] = source
        words[Call.DESTINATION] = destination
        self.sign(len(shape), *shape)
        self.show_shape(shape)
        self.keep = (*self.keep, *keep)

    def set_extents(
        self, reads: Sequence[tuple[int, int]], writes: Sequence[tuple[int, int]]
    ) -> None:
        """Set the address ranges of the inputs and outputs, given as (address, bytes)."""
        for field, areas in ((Call.READS, reads), (Call.WRITES, writes)):
            self.words[field] = min((start for start, _ in areas), default=0)
            self.words[field + 1] = max((start + size for start, size in areas), default=0)

    def set_table(self, field: Call, values: Sequence[int]) -> None:
        """Store numbers for compiled code, and their address in a field."""
        table = np.array(values, np.int64)
        self.words[field] = table.ctypes.data
        self.keep = (*self.keep, table)
