"""The steps that calls on GPU arrays enqueue in addition to calls of a library, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from gpucoll.devices import Device


class Place(NamedTuple):
    """This rank and the communicator's size."""

    rank: int
    world_size: int


class Copy(NamedTuple):
    """A copy on the device."""

    destination: int
    source: int
    size_bytes: int


class Fill(NamedTuple):
    """A number of elements, all set to one value."""

    destination: int
    element: bytes
    n_elements: int


class Run(NamedTuple):
    """A kernel."""

    enqueue: Callable[[int], None]
    """Puts it on a stream, any number of times."""


Step = Copy | Fill | Run


def on_its_stream(enqueue: Callable[[], None]) -> Run:
    """Return the step of a kernel that was prepared for its stream."""
    return Run(lambda _: enqueue())


def enqueue_steps(
    steps: Iterable[Step],
    device: Device,
    stream: int,
    in_driver: Callable[[], AbstractContextManager[None]],
) -> None:
    """Put steps on a stream of the current device; `in_driver` surrounds each of them."""
    for step in steps:
        with in_driver():
            if isinstance(step, Copy):
                device.copy(*step, stream)
            elif isinstance(step, Fill):
                device.fill(*step, stream)
            else:
                step.enqueue(stream)
