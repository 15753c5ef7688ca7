"""What tells one kind of array from another, found faster than by looking at all of it.

A library's `look` says what an array is, in words that every backend understands. Where the same
kind of array comes again and again, it is enough to know that it is the same kind: a library's own
``fingerprint(x)`` returns what decides that, as it has it, and the address; None where x is too
special.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeAlias

from gpucoll.arrays.library import Library
from gpucoll.errors import GpucollError

Fingerprint: TypeAlias = tuple[Hashable, int]
"""What kind of array it is, and where it lies."""


def fingerprint_of(library: Library) -> Callable[[Any], Fingerprint | None]:
    """Return what takes the fingerprint of a library's arrays, to be read or written."""
    return getattr(library, "fingerprint", None) or partial(_fingerprint, library)


def _fingerprint(library: Library, x: Any) -> Fingerprint | None:
    """Look at an array in full."""
    try:
        template, address, owner, strides = library.look_at_out(x)
    except GpucollError:
        return None  # the long way says it in its own words
    if owner is not x:
        return None
    sort = template.shape, template.dtype, template.device, template.stream, strides is None
    return sort, address
