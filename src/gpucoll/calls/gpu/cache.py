"""Cached calls on GPU arrays: for repeated calls, only addresses are left to prepare.

A training step repeats the same few kinds of call: collective, op, root, dtype, shape, device. The
first call of a kind takes the slow path, with all its checks and errors, and leaves a `CachedCall`:
as one compiled step if it came down to one function of the library, otherwise as a `RepeatedCall`,
which keeps what is enqueued by addresses. The next call only computes the fingerprint of its
arrays; a call that differs in any way takes the slow path again. Nothing ever has to be
invalidated: what is kept by addresses is right for any arrays there, streams are not part of it,
and the communicator's state is checked every time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from gpucoll.arrays import streams
from gpucoll.arrays.library import Destination, Library, fingerprint_of
from gpucoll.backends.gpu.repeated_call import RepeatedCall
from gpucoll.calls.given import AnyInput, AnyResult, Given
from gpucoll.calls.gpu.work import GpuWork
from gpucoll.calls.preparation import Prepared
from gpucoll.collectives import Collective

if TYPE_CHECKING:  # a communicator without GPUs needs none of it
    from gpucoll.backends.gpu.compiled_call import CompiledCall
    from gpucoll.backends.gpu.protocol import GpuBackend
    from gpucoll.devices import Device

_MOST = 1024
"""How many are kept for each type of array, like the number of signatures kept."""


class CachedCall(NamedTuple):
    """What all calls of a kind have in common."""

    call: CompiledCall | RepeatedCall
    current_stream: Callable[[], int]
    source_bytes: int
    destination_bytes: int
    make: Callable[[], Destination] | None
    """Makes the destination, if the user gives none."""


class CachedCalls:
    """The cached calls of arrays of one type.

    Parameters
    ----------
    library : Library
        The library of these arrays.
    device : Device
        The communicator's device.
    """

    def __init__(self, library: Library, device: Device) -> None:
        self._fingerprint = fingerprint_of(library)
        self._complete = library.complete
        self._device = device if streams.forgets_freed_memory(library) else None
        """The device, if it must be asked whether the memory still exists."""
        self._kept: dict[Hashable, CachedCall] = {}

    def learn(
        self,
        collective: Collective,
        x: AnyInput,
        given: Given,
        made: Prepared,
        connected: GpuBackend,
    ) -> None:
        """Cache a call that has taken the slow path, if it can be cached."""
        found = self._look(collective, x, given)
        if found is None or found[0] in self._kept:
            return
        request, template = made.request, made.template
        source, destination = request.source, request.destination
        assert source is not None  # see the function `learn`
        assert destination is not None
        if (
            given.get("out") is not x
            and source.address < destination.address + destination.size_bytes
            and destination.address < source.address + source.size_bytes
        ):
            return  # in place as a block, which may take another path
        signatures = connected.signatures([request])
        launches = connected.launches([request], ())
        compiled_call = connected.compiled_call(collective.spelled, signatures, launches)
        call: CompiledCall | RepeatedCall
        if compiled_call is not None and compiled_call[1] == (source.address, destination.address):
            call = compiled_call[0]
        else:
            is_own = given.get("out") is not None
            call = RepeatedCall(connected, collective.spelled, request, is_own)
        make = partial(template.library.new, template, destination.shape)
        cached_call = CachedCall(
            call,
            streams.current_stream_of(template),
            source.size_bytes,
            destination.size_bytes,
            make if given.get("out") is None else None,
        )
        if len(self._kept) >= _MOST:
            self._kept.clear()
        self._kept[found[0]] = cached_call

    def _look(
        self, collective: Collective, x: AnyInput, given: Given
    ) -> tuple[Hashable, int, int] | None:
        """Return the kind of a call, and the addresses of x and of `out` (0 if there is none).

        None if the arrays need the full checks, or if rows are counted.
        """
        seen, out = self._fingerprint(x), given.get("out")
        if seen is None or (collective.has_blocks and _has_counts(given)):
            return None
        sort, source = seen
        out_sort: Hashable = None
        destination = 0
        if out is x:
            out_sort, destination = True, source
        elif out is not None:
            if type(out) is not type(x) or (seen := self._fingerprint(out)) is None:
                return None
            out_sort, destination = seen
        root = given.get("root")  # the key has its type, too, because False equals 0
        key = collective, given.get("op"), root, type(root), sort, out_sort
        return key, source, destination

    def repeat(
        self,
        collective: Collective,
        x: AnyInput,
        given: Given,
        async_op: bool,
        timeout_s: float | None,
    ) -> AnyResult:
        """Repeat a call of a known kind; None: nothing was done, and it needs the slow path."""
        found = self._look(collective, x, given)
        if found is None:
            return None
        key, source, destination = found
        try:
            cached_call = self._kept.get(key)
        except TypeError:  # an argument that cannot be hashed is invalid anyway
            return None
        if cached_call is None:
            return None
        call, current_stream, source_bytes, destination_bytes, make = cached_call
        out, made = given.get("out"), None
        if make is not None:
            made = make()
            destination, out = made.buffer.address, made.buffer.owner
        elif (
            out is not x
            and source < destination + destination_bytes
            and destination < source + source_bytes
        ):
            return None  # in place as a block, or an error
        if not source or not destination:
            return None
        if self._device is not None and not _are_there(self._device, source, destination):
            return None
        stream = leader = current_stream()
        if async_op:
            stream = call.issuer.own_stream
        issued = call.issue(source, destination, stream, leader, (x, out), timeout_s)
        if issued is None:
            return None
        if async_op:
            finish = partial(self._finish, out) if made is None else made.finish
            return GpuWork(call.issuer, issued, finish, current_stream, must_complete=False)
        if made is not None:
            return made.finish()
        self._complete(out, None)
        return out

    def _finish(self, out: AnyInput) -> AnyResult:
        self._complete(out, None)
        return out


def _has_counts(given: Given) -> bool:
    return given.get("counts") is not None or given.get("receive_counts") is not None


def learn(
    cache: dict[type, CachedCalls],
    collective: Collective,
    x: AnyInput,
    given: Given,
    made: Prepared,
    connected: GpuBackend,
) -> None:
    """Cache a call that has taken the slow path, if it can be cached.

    `cache` has a communicator's cached calls, by the type of the input array.
    """
    request, library = made.request, made.template.library
    if (
        request.source is None
        or request.destination is None
        or request.counts is not None
        or made.is_packed
        or made.lasting is None
        or not streams.is_stream_ordered(library)
        or (given.get("out") is None and streams.forgets_freed_memory(library))
    ):
        return
    if type(x) not in cache:
        cache[type(x)] = CachedCalls(library, connected.device)
    cache[type(x)].learn(collective, x, given, made, connected)


def _are_there(device: Device, *addresses: int) -> bool:
    """Return whether these are addresses of memory on a device."""
    return all(device.device_of(address) == device.number for address in addresses)
