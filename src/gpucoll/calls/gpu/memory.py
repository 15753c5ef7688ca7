"""Memory on a GPU that the vendor's library knows, as arrays of any library."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.library import Template
from gpucoll.arrays.numpy_arrays import template_of_dtype

if TYPE_CHECKING:
    from gpucoll.backends.nccl.memory import Memory


class Registration:
    """Memory of an array that the vendor's library knows; made by `Communicator.register`."""

    def __init__(self, connected: Any, buffer: Buffer) -> None:
        self._connected = connected
        self._owner = buffer.owner
        with connected.issuer.lock, connected.device:
            registrations = connected.backend.registrations
            self._made = registrations.register(buffer.address, buffer.size_bytes)

    @property
    def is_open(self) -> bool:
        """Whether the library knows the memory: not where it has no use for that."""
        return self._made is not None and self._made.is_open

    def close(self) -> None:
        """End it, when calls on the array are done. Closing twice does nothing."""
        if self._made is not None:
            with self._connected.issuer.lock, self._connected.device:
                self._made.close()
        self._made = self._owner = None

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def empty(
    connected: Any,
    shape: tuple[int, ...],
    dtype: Any,
    template: Template | None,
    allocate: Callable[[int], Memory] | None = None,
) -> Any:
    """Return a new array of a library, or a DeviceArray without a template.

    `allocate` brings the memory, where it is not just registered.
    """
    of_dtype = template.library.template_of_dtype if template is not None else template_of_dtype
    wanted = of_dtype(dtype, template)
    size_bytes = math.prod(shape) * wanted.item_bytes
    memory = (allocate or partial(_registered, connected))(size_bytes)
    array = memory.array(shape, wanted.dtype)
    adopt = None if template is None else getattr(template.library, "adopt", None)
    return array if adopt is None else adopt(array, wanted)


def _registered(connected: Any, size_bytes: int) -> Memory:
    """Return memory that the library knows on this rank."""
    registrations = connected.backend.registrations
    registrations.collect(connected.issuer.lock)
    with connected.issuer.lock, connected.device:
        return cast("Memory", registrations.allocate(size_bytes))
