"""Memory on a GPU that the vendor's library knows, as arrays of any library."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.library import Template
from gpucoll.arrays.numpy_arrays import template_of_dtype
from gpucoll.backends.gpu.protocol import GpuBackend, Memory


class Registration:
    """Memory of an array that the vendor's library knows; made by `Communicator.register`."""

    def __init__(self, connected: GpuBackend, buffer: Buffer) -> None:
        self._connected = connected
        self._owner = buffer.owner
        with connected.issuer.lock, connected.device:
            self._made = connected.register(buffer.address, buffer.size_bytes)

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
    allocate: Callable[[int], Memory],
    shape: tuple[int, ...],
    dtype: Any,
    template: Template | None,
) -> Any:
    """Return a new array of a library, or a DeviceArray without a template.

    `allocate` brings the memory: so many bytes.
    """
    of_dtype = template.library.template_of_dtype if template is not None else template_of_dtype
    wanted = of_dtype(dtype, template)
    array = allocate(math.prod(shape) * wanted.item_bytes).array(shape, wanted.dtype)
    adopt = None if template is None else getattr(template.library, "adopt", None)
    return array if adopt is None else adopt(array, wanted)
