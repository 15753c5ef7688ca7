"""The parts of a call of several hosts: collectives inside a host, exchanges between leaders."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.algorithms.steps import Step
from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.cpu.host.backend import CpuBackend
from gpucoll.backends.protocol import PartOf, Request
from gpucoll.collectives import Collective
from gpucoll.errors import MismatchError
from gpucoll.group.host.noting import is_watched, note_block
from gpucoll.group.host.records import describe_block
from gpucoll.group.world.call import NO_TRANSFER, Transfer, WorldCall
from gpucoll.group.world.group import WorldGroup
from gpucoll.group.world.schedules import Schedule, Section
from gpucoll.kernels.cpu.addresses import REDUCE_ARGUMENTS
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.layout import SHOWN_DIMENSIONS
from gpucoll.transport.shared.words import Call
from gpucoll.transport.tcp.streams import ALL, Reduction
from gpucoll.types import ReduceOp

Bytes = npt.NDArray[np.uint8]
LEADER = 0
"""The leader's place on its host."""


class Signature:
    """The properties that all calls with the same arguments share, whatever their memory.

    Parameters
    ----------
    block : CallBlock
        The call as a single host would make it, with what ranks compare and with its kernel.
    request : Request
        The call.
    host : CpuBackend
        Moves data inside this host.
    n_here : int
        Number of ranks of this host.
    """

    def __init__(self, block: CallBlock, request: Request, host: CpuBackend, n_here: int) -> None:
        self.block = block
        words = block.words
        self.digest = int(words[Call.digest])
        self.described = describe_block(block)
        n_dimensions = int(words[Call.n_dimensions])
        n_shown = min(n_dimensions, SHOWN_DIMENSIONS)
        shown = words[Call.dimensions : Call.dimensions + n_shown]
        not_shown = [1] * (n_dimensions - n_shown)
        asked, data = request.part_of, request.data
        self.part_of = PartOf(
            Collective(int(words[Call.collective])),
            asked.op if asked else request.op,
            asked.dtype if asked else data.dtype,
            asked.detail if asked else (request.op.parameter_bits if request.op else 0),
            tuple(int(size) for size in (*shown, *not_shown)),
            (self.digest,),
            request.root,
            request.counts or (),
        )
        nothing = flat(np.empty(0, np.uint8))
        self.agreement = host.prepare(
            Request(
                Collective.GATHER,
                nothing,
                nothing,
                root=LEADER,
                counts=(0,) * n_here,
                part_of=self.part_of,
            )
        )
        """Checks whether the ranks of this host make the same call, and notes it if they do."""


class Phases:
    """One call, which can be made any number of times.

    Parameters
    ----------
    group : WorldGroup
        The ranks.
    host : CpuBackend
        Moves data inside this host.
    signature : Signature
        The call's signature.
    request : Request
        The call.
    """

    def __init__(
        self, group: WorldGroup, host: CpuBackend, signature: Signature, request: Request
    ) -> None:
        self.group = group
        self.host = host
        self.request = request
        self.block = signature.block
        self.digest, self.described = signature.digest, signature.described
        self.part_of = signature.part_of
        self.agreement = signature.agreement

    @contextlib.contextmanager
    def begun(self, timeout_s: float | None) -> Iterator[Run]:
        """Make the call within the block."""
        host = self.group.host
        begun_ns = time.monotonic_ns() if is_watched(host.members) else 0
        with self.group.calls.call(self.described, timeout_s) as call:
            run = Run(self, call)
            if len(run.here) == 1:  # there is no other part inside this host
                self.agreement.run(call.left_s)
            yield run
        if begun_ns:
            note_block(host.members, host.context, self.block, self.group.number, begun_ns)


class Run:
    """A call in progress, on this rank."""

    def __init__(self, phases: Phases, call: WorldCall) -> None:
        self.request = phases.request
        self.group = phases.group
        self.hosts = phases.group.hosts
        self.call = call
        self.leads = call.leads
        self.block = phases.block
        self._phases = phases
        self.here = self.hosts.ranks[self.group.here]
        """The ranks of this host."""

    # --- this rank's arrays -----------------------------------------------------------------------

    def input(self) -> Bytes:
        """Return the bytes of this rank's input in one array; empty if it has none."""
        return input_of(self.request)

    def output(self) -> Bytes:
        """Return memory for this rank's output: its own bytes, or temporary ones for `put`."""
        return output_of(self.request)

    def put(self, output: Bytes) -> None:
        """Copy the bytes of `output` to the user's arrays."""
        put_into(self.request, output)

    # --- inside this host -------------------------------------------------------------------------

    def inside(
        self,
        collective: Collective,
        source: Buffer | None,
        destination: Buffer | None,
        *,
        op: ReduceOp | None = None,
        root: int = LEADER,
        counts: Sequence[int] | None = None,
    ) -> None:
        """Run a collective of this host's ranks, as a part of the call."""
        request = Request(
            collective,
            source,
            destination,
            op,
            root,
            None if counts is None else tuple(counts),
            part_of=self._phases.part_of,
        )
        self._phases.host.prepare(request).run(self._limit_s())

    def _limit_s(self) -> float:
        """Return how long a part inside this host may take."""
        # If the others wait for the leader, the leader's own deadline explains more.
        return self.call.left_s + (0.0 if self.leads else 1.0)

    def gather(self, source: Bytes, sizes: Sequence[int]) -> list[Bytes]:
        """Bring bytes of all ranks of this host, with sizes by place, to the leader."""
        if len(self.here) == 1:
            return [source]
        found = np.empty(sum(sizes) if self.leads else 0, np.uint8)
        destination = flat(found) if self.leads else None
        self.inside(Collective.GATHER, flat(source), destination, counts=sizes)
        return cut(found, sizes) if self.leads else []

    def scatter(
        self, parts: Sequence[Bytes] | None, destination: Bytes, sizes: Sequence[int]
    ) -> None:
        """Bring each rank of this host its bytes, with sizes by place, from the leader."""
        if len(self.here) == 1:
            assert parts is not None
            destination[:] = joined(parts)
            return
        source = flat(joined(parts)) if parts is not None else None
        self.inside(Collective.SCATTER, source, flat(destination), counts=sizes)

    def spread(self, destination: Bytes, root: int = LEADER) -> None:
        """Bring the bytes of one rank of this host, by default the leader, to all of them."""
        if len(self.here) == 1:
            return
        buffer = flat(destination)
        source = buffer if self.group.host.rank == root else None
        self.inside(Collective.BROADCAST, source, buffer, root=root)

    def gather_into(self, landing: Bytes | None, source: Bytes, sizes: Sequence[int]) -> None:
        """Bring bytes of all ranks of this host, sizes by place, to the leader's `landing`."""
        if len(self.here) == 1:
            assert landing is not None
            landing[:] = source
            return
        destination = None if landing is None else flat(landing)
        self.inside(Collective.GATHER, flat(source), destination, counts=sizes)

    # --- between hosts ----------------------------------------------------------------------------

    def agree(self) -> None:
        """Make sure that all ranks make the same call, before any part of it is done."""
        phases = self._phases
        if len(self.here) > 1:
            # No other host learns of a call before the leader knows that all ranks here make it.
            phases.agreement.run(self._limit_s())
        word: bytes | MismatchError | None = None
        if self.leads:
            word = self.call.tried(lambda: self.call.agree(phases.digest, phases.described))
        self.call.deliver(phases.part_of.collective, self.request.root, word)

    def transfer(
        self,
        make: Callable[..., list[Step]],
        edges: Sequence[int],
        work: Bytes,
        *,
        root: int | None = None,
        reduction: Reduction | None = None,
    ) -> None:
        """Run a schedule over one section, given as for `begin`, to its end."""
        sections = [Section.of(edges)]
        self.begin(make, sections, work.ctypes.data, root=root, reduction=reduction).finish()

    def begin(
        self,
        make: Callable[..., list[Step]],
        sections: Sequence[Section],
        work_address: int,
        *,
        root: int | None = None,
        reduction: Reduction | None = None,
        ready: int = ALL,
        is_one_step: bool = False,
    ) -> Transfer:
        """Begin a schedule between the leaders, after all ranks have agreed; on others do nothing.

        Parameters
        ----------
        make, sections, is_one_step
            See `gpucoll.group.world.schedules.Schedule`.
        work_address : int
            Address of the working buffer, which holds the sections.
        root : int, optional
            A rank; its host is the root of the schedule.
        ready : int
            How many pieces of this host are ready (`Section.gates`).
        """
        if not self.leads:
            return NO_TRANSFER
        host = None if root is None else self.hosts.host_of(root)
        schedule = Schedule(make, tuple(sections), host, is_one_step)
        digest = self._phases.digest
        return self.call.begin_transfer(schedule, work_address, digest, reduction, ready)


# --- combining ----------------------------------------------------------------------------------


@functools.cache
def _kernel(address: int) -> Any:
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * REDUCE_ARGUMENTS)(address)


def combine(run: Run, sources: Sequence[Bytes], destination: Bytes, n_ranks: int) -> None:
    """Combine the inputs of the first ranks, in order, with the call's operation."""
    words = run.block.words
    if not destination.size:
        return
    addresses = np.array([source.ctypes.data for source in sources], np.int64)
    landing = np.array([destination.ctypes.data], np.int64)
    count = destination.size // int(words[Call.part_bytes])
    parameter = int(words[Call.parameter])
    parameter += int(words[Call.parameter_stride]) * (n_ranks - 1)
    _kernel(int(words[Call.kernel]))(
        landing.ctypes.data, 1, addresses.ctypes.data, len(addresses), count, parameter, 0
    )


# --- a rank's arrays as bytes --------------------------------------------------------------------


def input_of(request: Request) -> Bytes:
    """Return the bytes of a rank's input in one array; empty if it has none."""
    if request.parts:
        return joined([bytes_of(source) for source, _ in request.parts])
    if request.sources:
        return joined([bytes_of(source) for source in request.sources])
    return bytes_of(request.source) if request.source is not None else np.empty(0, np.uint8)


def output_of(request: Request) -> Bytes:
    """Return memory for a rank's output: its own bytes, or temporary ones for `put_into`."""
    if request.parts:
        return np.empty(sum(source.size_bytes for source, _ in request.parts), np.uint8)
    if request.destinations:
        return np.empty(sum(each.size_bytes for each in request.destinations), np.uint8)
    return bytes_of(request.destination) if request.destination else np.empty(0, np.uint8)


def put_into(request: Request, output: Bytes) -> None:
    """Copy the bytes of an output to the user's arrays."""
    buffers = [landing for _, landing in request.parts] or list(request.destinations)
    for buffer, part in zip(
        buffers, cut(output, [buffer.size_bytes for buffer in buffers]), strict=True
    ):
        bytes_of(buffer)[:] = part


# --- bytes --------------------------------------------------------------------------------------


def flat(array: npt.NDArray[Any]) -> Buffer:
    """Return an array's bytes as a buffer."""
    return Buffer(array.ctypes.data, (array.nbytes,), "uint8", 1, array)


def bytes_of(buffer: Buffer) -> Bytes:
    """Return a view of a buffer's bytes."""
    if not buffer.size_bytes:
        return np.empty(0, np.uint8)
    return at_address(buffer.address, buffer.size_bytes)


def at_address(address: int, size_bytes: int) -> Bytes:
    """Return a view of memory, which its owner must keep alive."""
    pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8))
    return np.ctypeslib.as_array(pointer, (size_bytes,))


def cut(data: Bytes, sizes: Sequence[int]) -> list[Bytes]:
    """Return consecutive pieces of these sizes."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return pieces


def joined(parts: Sequence[Bytes]) -> Bytes:
    """Return pieces as one array."""
    return np.concatenate([*parts, np.empty(0, np.uint8)])
