"""The part of a call on GPU arrays that the ranks compare: call blocks to post, and to keep."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

from gpucoll.backends.protocol import Request
from gpucoll.group.protocol import EnqueuedCalls
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.words import Call
from gpucoll.types import digest_of

_KEPT = 1024
"""How many signatures a communicator keeps: a training step has hundreds of shapes."""


class Signature(NamedTuple):
    """A function that posts a call, and the memory that it reads."""

    post: Callable[[], int]
    """A built-in that returns a `Status`."""
    block: CallBlock


class Signatures:
    """Makes the functions that post the signatures of requests: one for each kind of call.

    Parameters
    ----------
    calls : EnqueuedCalls
        Posts and compares the calls.
    rank, world_size : int
        This rank and the communicator's size.
    """

    def __init__(self, calls: EnqueuedCalls, rank: int, world_size: int) -> None:
        self._calls = calls
        self._rank = rank
        self._world_size = world_size
        self._kept: dict[Hashable, Signature] = {}

    def of(self, request: Request) -> Signature:
        """Return the signature that posts this request."""
        key = _key_of(request)
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            block = self._block_of(request)
            found = self._kept[key] = Signature(self._calls.poster(block), block)
        return found

    def _block_of(self, request: Request) -> CallBlock:
        data = request.data
        block = CallBlock(
            request.collective,
            0,
            dtype=data.dtype,
            item_bytes=data.item_bytes,
            op=request.op,
            root=request.root,
        )
        block.set_arrays(data.shape, 0, 0)
        if (whole := request.part_of) is not None:
            block.set_call(whole.collective, whole.dtype, whole.op, request.root, whole.detail)
            block.sign(*whole.numbers)
            block.show_shape(whole.shape)
        elif request.parts:
            block.sign_list([source.shape for source, _ in request.parts])
        elif request.counts is not None:
            self._sign_counts(block, request)
        elif request.collective.knows_one_block:
            is_whole = request.source is not None
            count = data.count // (self._world_size if is_whole else 1)
            block.sign_block(count)
        return block

    def _sign_counts(self, block: CallBlock, request: Request) -> None:
        counts, received = request.counts, request.receive_counts
        assert counts is not None
        block.words[Call.n_counts] = len(counts)
        block.set_table(Call.counts, counts)
        if received is None:
            block.sign(request.row_count, *counts)
            return
        # Two ranks must agree on the number of rows between them: summed over all ranks, the rows
        # sent then equal the rows received.
        block.sign(request.row_count)
        mine = self._rank
        sent_pairs = ((mine, peer, count) for peer, count in enumerate(counts))
        received_pairs = ((peer, mine, count) for peer, count in enumerate(received))
        block.words[Call.sent] = sum(map(digest_of, sent_pairs))
        block.words[Call.received] = sum(map(digest_of, received_pairs))


def _key_of(request: Request) -> Hashable:
    data = request.data
    shapes = tuple(source.shape for source, _ in request.parts) if request.parts else data.shape
    return (
        request.collective,
        request.op,
        data.dtype,
        request.root,
        shapes,
        request.source is None,
        request.row_count,
        request.counts,
        request.receive_counts,
        request.part_of,
    )
