"""The fingerprint of an array: it tells one kind of array from another, without a full look.

A library's `look` describes an array in terms that every backend understands. For repeated calls it
is enough to know that the array is of a known kind. A library's own ``fingerprint(x)`` returns the
facts that decide this, in the library's own terms, and the address; or None if x needs a full look.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import TypeAlias

from gpucoll.arrays.library import AnyArray, Library
from gpucoll.errors import GpucollError

Fingerprint: TypeAlias = tuple[Hashable, int]
"""The kind of an array, and its address."""


def fingerprint_of(library: Library) -> Callable[[AnyArray], Fingerprint | None]:
    """Return the function that computes fingerprints of a library's arrays, inputs or outputs."""
    return getattr(library, "fingerprint", None) or partial(_fingerprint, library)


def _fingerprint(library: Library, x: AnyArray) -> Fingerprint | None:
    """Compute a fingerprint by a full look."""
    try:
        template, address, owner, strides = library.look_at_out(x)
    except GpucollError:
        return None  # the slow path raises the error
    if owner is not x:
        return None
    sort = template.shape, template.dtype, template.device, template.stream, strides is None
    return sort, address
