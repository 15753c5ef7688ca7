"""Detection of shared memory between arrays, by addresses and strides alone, on any device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.arrays.library import View

_OVERLAP_WORK: Any = 10_000  # any number is allowed, but not all NumPy versions' types say so


def overlaps(a: View, b: View) -> bool:
    """Return whether the two have a byte in common."""
    first, second = _extent(a), _extent(b)
    if first[0] >= second[1] or second[0] >= first[1]:
        return False
    if a.strides is None and b.strides is None:
        return True
    try:
        return np.shares_memory(_stand_in(a), _stand_in(b), max_work=_OVERLAP_WORK)
    except np.exceptions.TooHardError:
        return True  # undecidable in reasonable time; such views are not worth a risk


def overlaps_itself(view: View) -> bool:
    """Return whether two elements share a byte, or are interleaved so that they may."""
    if view.strides is None or 0 in view.template.shape:
        return False
    reach = view.template.item_bytes
    """Distance from an element's first byte to the one after its last, up to this dimension."""
    lengths = zip(view.strides, view.template.shape, strict=True)
    for step, length in sorted((abs(stride), length) for stride, length in lengths if length > 1):
        if step < reach:
            return True
        reach += step * (length - 1)
    return False


def _extent(view: View) -> tuple[int, int]:
    """Return the first address and the one after the last; equal if there are no elements."""
    start = view.address
    template = view.template
    if view.strides is None or 0 in template.shape:
        return start, start + template.size_bytes
    reaches = [
        (length - 1) * stride for length, stride in zip(template.shape, view.strides, strict=True)
    ]
    low = sum(reach for reach in reaches if reach < 0)
    high = sum(reach for reach in reaches if reach > 0)
    return start + low, start + high + template.item_bytes


def _stand_in(view: View) -> npt.NDArray[np.generic]:
    """Return an array with the view's layout, for arithmetic only: the memory may be a GPU's."""
    interface = {
        "version": 3,
        "typestr": f"|V{view.template.item_bytes}",
        "shape": view.template.shape,
        "strides": view.strides,
        "data": (view.address, True),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
