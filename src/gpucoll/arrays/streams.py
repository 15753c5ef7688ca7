"""Streams of every library as addresses, and what each library guarantees about their order."""

from __future__ import annotations

from collections.abc import Callable

from gpucoll.arrays.library import AnyStream, Library, Template, kind_of
from gpucoll.errors import ArgumentTypeError


def address_of(stream: AnyStream) -> int:
    """Return the vendor's handle of a stream.

    Parameters
    ----------
    stream : int or stream
        The handle itself (for Intel GPUs the address of a ``sycl::queue``), a stream of CuPy,
        PyTorch or Numba, a queue of dpctl, or any object with ``__cuda_stream__``.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        if stream >= 0:
            return stream
    elif (protocol := getattr(stream, "__cuda_stream__", None)) is not None:
        _, handle = protocol() if callable(protocol) else protocol
        return int(handle)
    if (address_of_queue := getattr(stream, "addressof_ref", None)) is not None:  # dpctl
        return int(address_of_queue())
    for name in ("ptr", "cuda_stream", "sycl_queue"):  # CuPy, PyTorch
        if (address := getattr(stream, name, None)) is not None:
            return int(address)
    if (handle := getattr(stream, "handle", None)) is not None:  # Numba: a c_void_p
        return int(getattr(handle, "value", handle) or 0)
    raise ArgumentTypeError(
        "stream must be a stream of CuPy, PyTorch or Numba, its handle as an int, or have "
        f"__cuda_stream__; got {kind_of(stream)}"
    )


def current_stream(template: Template) -> int:
    """Return the stream on which the template's library currently works in this thread."""
    return current_stream_of(template)()


def current_stream_of(template: Template) -> Callable[[], int]:
    """Return a function that returns that stream each time it is called."""
    ask: Callable[[Template], Callable[[], int]] | None = getattr(
        template.library, "current_stream_of", None
    )
    return (lambda: template.stream) if ask is None else ask(template)


def is_stream_ordered(library: Library) -> bool:
    """Return whether the library's later work waits for the work on its current stream.

    If it does not (JAX), results must be complete before the library sees them.
    """
    return getattr(library, "IS_STREAM_ORDERED", True)


def forgets_freed_memory(library: Library) -> bool:
    """Return whether the driver knows which of the library's arrays have been freed.

    With a memory pool (CuPy, PyTorch, JAX), freed memory still belongs to the process.
    """
    return getattr(library, "FORGETS_FREED_MEMORY", False)
