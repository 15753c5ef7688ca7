"""Requests for calls with lists of blocks: which memory is read and written, and the checks."""

from __future__ import annotations

from collections.abc import Sequence

from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.library import Destination, Template
from gpucoll.arrays.operands import destination_of, ensure_served, source_of, template_of
from gpucoll.backends.protocol import Request
from gpucoll.calls.block_lists import rows_of, templates_of
from gpucoll.calls.exact_integers import check_range
from gpucoll.calls.given import AnyInput, AnyResult
from gpucoll.calls.lists import shared_by
from gpucoll.calls.preparation import Arguments, Prepared
from gpucoll.calls.shapes import Result, result_of
from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.wording import rank_of


def prepare_blocks(
    collective: Collective, x: AnyInput, arguments: Arguments, rank: int, world_size: int
) -> Prepared:
    """Check this rank's arguments, some of which are lists of blocks, and return the request.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An argument is invalid; the message says why.
    """
    return _Blocks(collective, x, arguments, rank, world_size).prepare()


class _Blocks:
    """One call with lists of blocks, while it is prepared."""

    def __init__(
        self, collective: Collective, x: AnyInput, arguments: Arguments, rank: int, world_size: int
    ) -> None:
        self.collective, self.x, self.arguments = collective, x, arguments
        self.rank, self.world_size = rank, world_size
        self.who = f"{collective.spelled} on {rank_of(rank, world_size)}"
        self.is_packed = False

    def prepare(self) -> Prepared:
        template, shape = self._whole()
        counts, receive_counts = self.arguments.counts, self.arguments.receive_counts
        place = self.rank, self.world_size
        result = result_of(self.collective, shape, *place, counts, receive_counts)
        gets = self.collective.gets(self.rank, self.arguments.root)
        sends = self.collective.gives(self.rank, self.arguments.root)
        source, sources = self._sources(template, shape) if sends else (None, ())
        if not gets:
            request = self._request(result, source, sources, None, ())
            return Prepared(request, lambda: None, template, is_packed=self.is_packed)
        destinations = self._destinations(template, result)
        is_list = self._lands_in_list()
        if sends:
            self._check_overlaps(template, source, sources, destinations, result)
        buffers = tuple(each.buffer for each in destinations) if is_list else ()
        whole = _together(template, result.shape, 0) if is_list else destinations[0].buffer
        request = self._request(result, source, sources, whole, buffers)
        return Prepared(
            request,
            lambda: self._finish(destinations),
            template,
            self.is_packed,
            self._lasting(destinations),
        )

    def _whole(self) -> tuple[Template, tuple[int, ...]]:
        """Return the template of the input, and the shape of all its blocks together."""
        if not isinstance(self.x, list | tuple):
            template = template_of(self.x)
            ensure_served(template)
            check_range(template)
            return template, template.shape
        who = rank_of(self.rank, self.world_size)
        found = templates_of(self.x, "x", self.collective, who, self.world_size)
        rows = [rows_of(each.shape) for each in found]
        counts = self.arguments.counts
        if counts is not None and list(counts) != rows:
            raise ArgumentError(
                f"{self.who}: the blocks of x have {rows} rows, but counts is {counts}"
            )
        return found[0], (sum(rows), *found[0].shape[1:])

    def _sources(
        self, template: Template, shape: tuple[int, ...]
    ) -> tuple[Buffer, tuple[Buffer, ...]]:
        if not isinstance(self.x, list | tuple):
            source = source_of(self.x)
            self.is_packed = source.is_packed
            return source.buffer, ()
        found = [source_of(block, f"x[{place}]") for place, block in enumerate(self.x)]
        self.is_packed = any(source.is_packed for source in found)
        return _together(template, shape, 0), tuple(source.buffer for source in found)

    def _lands_in_list(self) -> bool:
        """Return whether the result is a list of blocks."""
        if self.collective.is_exchange and self.arguments.out is None:
            return isinstance(self.x, list | tuple)
        return self.collective.gathers and isinstance(self.arguments.out, list | tuple)

    def _landing_counts(self, result: Result) -> Sequence[int]:
        """Return the number of rows that come from each rank."""
        counts = self.arguments.counts
        if self.collective.is_exchange:
            counts = self.arguments.receive_counts
        return counts or [rows_of(result.shape) // self.world_size] * self.world_size

    def _destinations(self, template: Template, result: Result) -> list[Destination]:
        """Return the destinations: one block for each rank, or one array for all of them."""
        out = self.arguments.out
        if not self._lands_in_list():
            shape = result.shape
            if isinstance(self.x, list | tuple) and not self.collective.gathers:
                shape = template_of(self.x[self.rank]).shape  # even of a 0-d block
            return [destination_of(template, shape, out)]
        made = []
        for place, rows in enumerate(self._landing_counts(result)):
            shape, block = (rows, *result.shape[1:]), None if out is None else out[place]
            if out is None and rows == 1 and template.shape == ():
                shape = ()
            try:
                made.append(destination_of(template, shape, block))
            except (ArgumentError, ArgumentTypeError) as error:
                raise type(error)(f"{self.who}: out[{place}]: {error}") from None
        return made

    def _request(
        self,
        result: Result,
        source: Buffer | None,
        sources: tuple[Buffer, ...],
        destination: Buffer | None,
        destinations: tuple[Buffer, ...],
    ) -> Request:
        arguments = self.arguments
        request = Request(self.collective, source, destination, arguments.op, arguments.root)
        return request._replace(
            counts=arguments.counts,
            receive_counts=arguments.receive_counts,
            row_count=result.row_count,
            sources=sources,
            destinations=destinations,
        )

    def _check_overlaps(
        self,
        template: Template,
        source: Buffer | None,
        sources: tuple[Buffer, ...],
        destinations: list[Destination],
        result: Result,
    ) -> None:
        """Raise if memory that is written is also read or written as another block."""
        n, me, written = self.world_size, self.rank, [each.buffer for each in destinations]
        assert source is not None
        reads: list[list[Buffer]] = [[buffer] for buffer in sources]
        if not sources and self.collective.spreads:
            sent = self.arguments.counts or [rows_of(source.shape) // n] * n
            reads = [[part] for part in _parts(template, source, sent)]
        elif not sources:
            reads = [[source] if rank == me else [] for rank in range(n)]
        writes = [[buffer] for buffer in written]
        if not self._lands_in_list() and self.collective.gathers:
            parts = _parts(template, written[0], self._landing_counts(result))
            writes = [[part] for part in parts]
        elif not self._lands_in_list():
            writes = [written if rank == me else [] for rank in range(n)]
        if shared := shared_by([*zip(reads, writes, strict=True)]):
            raise ArgumentError(
                f"{self.who}: out shares memory with x, or with itself, at blocks {shared[0]} and "
                f"{shared[1]}: give arrays of their own"
            )
        self._check_in_place(reads, writes)

    def _check_in_place(self, reads: list[list[Buffer]], writes: list[list[Buffer]]) -> None:
        """Raise unless each block that is read and written is exactly in place: own, or all."""
        in_place, filled = set(), set()
        for rank, (read, write) in enumerate(zip(reads, writes, strict=True)):
            if not read or not write or not (read[0].size_bytes and write[0].size_bytes):
                continue
            filled.add(rank)
            (start, size), (other, length) = _extent(read[0]), _extent(write[0])
            if start < other + length and other < start + size:
                in_place.add(rank)
                if (start, size) != (other, length):
                    raise ArgumentError(
                        f"{self.who}: block {rank} of out overlaps that of x without being it: "
                        "give the same memory (in place) or an array of its own"
                    )
        if not (in_place <= {self.rank} or in_place == filled):
            raise ArgumentError(
                f"{self.who}: only blocks {sorted(in_place)} are in place: give all of x as out, "
                f"or arrays of their own for all blocks but this rank's, {self.rank}"
            )

    def _finish(self, destinations: list[Destination]) -> AnyResult:
        results = [each.finish() for each in destinations]
        if not self._lands_in_list():
            return results[0]
        if self.arguments.out is not None:
            return self.arguments.out
        return tuple(results) if isinstance(self.x, tuple) else results

    def _lasting(self, destinations: list[Destination]) -> AnyResult:
        lasting = [each.lasting for each in destinations]
        if any(each is None for each in lasting):
            return None
        if not self._lands_in_list():
            return lasting[0]
        out = self.arguments.out
        return out if out is not None else (tuple(lasting) if type(self.x) is tuple else lasting)


def _extent(buffer: Buffer) -> tuple[int, int]:
    return buffer.address, buffer.size_bytes


def _together(template: Template, shape: tuple[int, ...], address: int) -> Buffer:
    """Return a buffer that stands for several blocks as one array."""
    return Buffer(address, shape, template.dtype, template.item_bytes, None, template.device)


def _parts(template: Template, whole: Buffer, counts: Sequence[int]) -> list[Buffer]:
    """Return the blocks of an array, each with its count of rows."""
    made, address = [], whole.address
    rows = sum(counts)
    row = whole.count // rows if rows else 0
    for count in counts:
        made.append(_together(template, (count, row), address))
        address += made[-1].size_bytes
    return made
