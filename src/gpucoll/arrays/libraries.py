"""The table of array libraries, and of the modules of this package that serve them.

To add a library, write a module with the functions of `gpucoll.arrays.library.Library` and add a
row. The module is imported with the first array of its library, so it may import the library.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NoReturn, cast

from gpucoll.arrays import numpy_arrays
from gpucoll.arrays.library import AnyArray, Library, kind_of, raise_not_an_array
from gpucoll.errors import ArgumentTypeError

NUMBERS = numpy_arrays.NUMBERS
NUMPY = cast(Library, numpy_arrays)

LIBRARIES = {
    "cupy": "cupy_arrays",
    "jax": "jax_arrays",
    "jaxlib": "jax_arrays",
    "numba": "numba_arrays",
    "numpy": "numpy_arrays",
    "torch": "torch_tensors",
}
"""Root module of a type, or of one of its bases -> the module here."""

PROTOCOLS = (
    "__cuda_array_interface__",
    "__sycl_usm_array_interface__",
    "__array_interface__",
    "__dlpack__",
)
"""Attributes that describe arrays of other libraries; `foreign_arrays` reads them."""

REMEDIES = {
    "dask": "compute it first: x.compute()",
    "pandas": "pass x.to_numpy()",
    "polars": "pass x.to_numpy()",
    "pyarrow": "pass x.to_numpy()",
    "scipy": "sparse arrays differ in structure from rank to rank: pass x.toarray(), or x.data "
    "if all ranks have the same structure",
    "tensorflow": "pass x.numpy()",
    "xarray": "pass x.values",
}
"""Root module of a type that is refused -> the remedy."""


def library_of(x: object, what: str) -> Library:
    """Return the module that serves x; raise ArgumentTypeError, with the remedy, if none does."""
    library = _find(x)
    if library is None:
        _raise_refused(x, what)
    return library


def is_array(x: object) -> bool:
    """Return whether x is an array of a served library, and not a number."""
    return not isinstance(x, NUMBERS) and _find(x) is not None


def library_of_dtype(dtype: object) -> Library:
    """Return the module for the library of a dtype; NumPy's for a name."""
    kind: Any = type(dtype)
    return _library_of_type(kind) or NUMPY


def _find(x: object) -> Library | None:
    kind: Any = type(x)
    library = _library_of_type(kind)
    if library is not None or any(root in REMEDIES for root in _roots(kind)):
        return library
    if not isinstance(x, type) and _has_protocol(x):  # on the object, as NumPy and CuPy look it up
        return _load("foreign_arrays")
    return _load("buffer_objects") if _is_buffer(x) else None


@functools.lru_cache(maxsize=256)
def _library_of_type(kind: type) -> Library | None:
    """Return the module that serves objects of this type, if the type alone decides it."""
    if issubclass(kind, NUMBERS):
        return NUMPY
    roots = _roots(kind)
    if any(root in REMEDIES for root in roots):
        return None
    for root in roots:
        if root in LIBRARIES:
            return _load(LIBRARIES[root])
    if hasattr(kind, "__host_device_array_interface__"):
        return _load("host_device_arrays")
    return _load("foreign_arrays") if _has_protocol(kind) else None


def _has_protocol(x: object) -> bool:
    return any(getattr(x, protocol, None) is not None for protocol in PROTOCOLS)


def _roots(kind: type) -> list[str]:
    return [base.__module__.partition(".")[0] for base in kind.__mro__]


def _is_buffer(x: AnyArray) -> bool:
    try:
        memoryview(x)
    except TypeError:
        return False
    return True


def _load(name: str) -> Library:
    return cast(Library, importlib.import_module(f"gpucoll.arrays.{name}"))


def _raise_refused(x: object, what: str) -> NoReturn:
    for root in _roots(type(x)):
        if root in REMEDIES:
            raise ArgumentTypeError(f"{what} is a {kind_of(x)}: {REMEDIES[root]}")
    raise_not_an_array(x, what)
