"""Ids and values that users pass to a table, of any array library in host memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpucoll.arrays.libraries import NUMPY, library_of
from gpucoll.arrays.library import AnyArray, Library
from gpucoll.arrays.numpy_arrays import address_of, array_at
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.tables.loops import place_outside
from gpucoll.tables.rows import Places

__all__ = ["Reader"]


class Reader:
    """Reads and checks the ids and values of a table.

    Parameters
    ----------
    who : str
        This rank, for errors.
    rows, width : int
        The table's shape.
    dtype : numpy.dtype
        Its dtype.
    """

    def __init__(self, who: str, rows: int, width: int, dtype: np.dtype[Any]) -> None:
        self.who, self.rows, self.width, self.dtype = who, rows, width, dtype
        self.dtype_name = str(NUMPY.template_of_dtype(dtype, None).dtype)

    def ids(self, ids: AnyArray, call: str) -> tuple[Places, tuple[int, ...], Library, Any]:
        """Return checked ids in one dimension, their shape, and their library."""
        library, like = NUMPY, None
        if isinstance(ids, int | np.generic | list | tuple | range):
            ids = self._of_numbers(ids, call)
        elif type(ids) is not np.ndarray:
            library = library_of(ids, "ids")
            view = library.look(ids, "ids")
            like = view.template
            self._check_host(like.device, "ids", call)
            self._check_integers(like.dtype, like.shape, call)
            if library is not NUMPY:
                if view.strides is not None:
                    view = library.pack(ids, like)
                ids = array_at(view.address, like.shape, np.dtype(like.dtype)).copy()
        self._check_integers(ids.dtype.name, ids.shape, call)
        shape = ids.shape
        # A copy: the rows may be written over the ids, and another thread may change those.
        places = np.array(ids, np.int64, order="C").reshape(-1)
        outside = place_outside.ctypes(address_of(places), len(places), self.rows)
        if outside >= 0:
            where = [int(index) for index in np.unravel_index(outside, shape)] if shape else ""
            raise ArgumentError(
                f"{self.who}: {call}: ids{where} is {ids.reshape(-1)[outside]}, but the table has "
                f"{self.rows} rows, 0 to {self.rows - 1}; nothing has changed"
            )
        return places, shape, library, like

    def _of_numbers(self, ids: Any, call: str) -> np.ndarray[Any, Any]:
        """Return ids that are no array as one."""
        try:
            made = np.asarray(ids)
        except ValueError:
            raise ArgumentTypeError(
                f"{self.who}: {call}: ids must be integers in lists of equal lengths"
            ) from None
        return made if made.size else made.astype(np.int64)

    def values(self, values: AnyArray, shape: tuple[int, ...]) -> tuple[Any, object]:
        """Return the values in contiguous memory, and what keeps that alive."""
        if self.is_plain(values, shape):
            return values, values
        library = library_of(values, "values")
        view = library.look(values, "values")
        template = view.template
        self._check_host(template.device, "values", "push")
        if template.dtype != self.dtype_name:
            raise ArgumentTypeError(
                f"{self.who}: push: values have dtype {template.dtype}, but the table has "
                f"{self.dtype_name}"
            )
        if template.shape != shape:
            raise ArgumentError(
                f"{self.who}: push: values have shape {template.shape}, but the ids need {shape}"
            )
        if view.strides is not None:
            view = library.pack(values, template)
        rows = array_at(view.address, (template.size_bytes,), np.dtype(np.uint8))
        return rows, view.owner

    def _check_integers(self, dtype: str, shape: tuple[int, ...], call: str) -> None:
        if not dtype.startswith(("int", "uint")):
            raise ArgumentTypeError(
                f"{self.who}: {call}: ids must be integers; got {dtype} of shape {shape}"
            )

    def is_plain(self, x: AnyArray, shape: tuple[int, ...]) -> bool:
        """Return whether an array of rows can be used as it is, without a full look."""
        if type(x) is not np.ndarray or x.dtype != self.dtype or x.shape != shape:
            return False
        return x.flags.c_contiguous

    def _check_host(self, device: str, what: str, call: str) -> None:
        if device != "cpu":
            raise ArgumentError(
                f"{self.who}: {call}: {what} lie on {device}: copy them to the host first"
            )
