"""GPU memory that the vendor's library has registered, as arrays of any library."""

from __future__ import annotations

import math
from collections.abc import Callable

from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.library import AnyArray, AnyDtype, Template
from gpucoll.arrays.numpy_arrays import template_of_dtype
from gpucoll.backends.gpu.protocol import GpuBackend, Memory


class Registration:
    """The registration of an array's memory, as `Communicator.register` makes it."""

    def __init__(self, connected: GpuBackend, buffer: Buffer) -> None:
        self._connected = connected
        self._owner = buffer.owner
        with connected.issuer.lock, connected.device:
            self._made = connected.register(buffer.address, buffer.size_bytes)

    @property
    def is_open(self) -> bool:
        """Whether the memory is registered: not if the library has no use for registration."""
        return self._made is not None and self._made.is_open

    def close(self) -> None:
        """End the registration after calls on the array are done. Closing twice does nothing."""
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
    dtype: AnyDtype,
    template: Template | None,
) -> AnyArray:
    """Return a new array of a library, or a DeviceArray without a template.

    `allocate` returns memory of a given number of bytes.
    """
    of_dtype = template.library.template_of_dtype if template is not None else template_of_dtype
    wanted = of_dtype(dtype, template)
    array = allocate(math.prod(shape) * wanted.item_bytes).array(shape, wanted.dtype)
    adopt = None if template is None else getattr(template.library, "adopt", None)
    return array if adopt is None else adopt(array, wanted)
