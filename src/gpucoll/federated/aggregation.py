"""`WeightedMean`: the mean of many clients' models, of which one is in memory at a time."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.api.agreement import agree, check_communicator
from gpucoll.api.communicator import Communicator
from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.numpy_arrays import array_at
from gpucoll.arrays.operands import destination_of, source_of
from gpucoll.errors import ArgumentError, ArgumentTypeError, StateError
from gpucoll.federated.layout import Arrays, Layout
from gpucoll.kernels.cpu.accumulate import add_scaled, narrow

__all__ = ["WeightedMean"]

_CHUNK = 1 << 15
"""Elements that are divided before they are narrowed: float32 numbers that fit into a cache."""


class WeightedMean:
    """The weighted mean of models that arrive one after the other.

    A server calls ``add(arrays, weight)`` for each client and then `result`. Whatever the number
    of clients, this object holds one model: the sum. Together with the model that is being added
    there are two in memory.

    Parameters
    ----------
    like : list, tuple or dict of arrays
        Arrays of NumPy, PyTorch, JAX or another library, in host memory, of float16, bfloat16,
        float32 or float64: the keys, shapes and dtypes that every model will have. Their values do
        not count, and the object does not keep them.

    Attributes
    ----------
    clients : int
        How many models have been added.
    size_bytes : int
        Size of the sums: 4 bytes for each element of float16, bfloat16 and float32, 8 for float64.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        `like` is not a list, tuple or dict of such arrays.

    Notes
    -----
    The result is exactly defined. Let x1, x2, ... be the models in the order in which they are
    added, w1, w2, ... their weights, and T the dtype of the sums: float32, or float64 for float64
    arrays. Then each element of the mean is, with every operation in T and rounded on its own,
    ::

        f = [T(w) for w in weights]
        total = f[0] * x[0]; total = total + f[1] * x[1]; ...
        mean = total / T(math.fsum(f))

    which half types round once more, to themselves. These are the bits of the same lines in NumPy.
    Integer weights up to 2^24 (2^53 for float64) are not rounded. A model of weight 0 is checked
    and counted, but not read, so that its infinities and NaNs do not count.

    `add` reads the model and the sum and writes the sum, in one pass. It works in the calling
    thread and releases the GIL. Use an object from one thread at a time.

    Examples
    --------
    >>> mean = WeightedMean(model)
    >>> for client in clients:
    ...     mean.add(client.weights(), client.number_of_images)
    >>> model = mean.result()
    """

    def __init__(self, like: Arrays) -> None:
        self._layout = Layout(like, "like")
        self._sums: dict[str, npt.NDArray[Any]] = {
            wide: np.empty(size, wide) for wide, size in self._layout.sizes.items()
        }
        self.size_bytes = sum(array.nbytes for array in self._sums.values())
        self.reset()

    def reset(self) -> None:
        """Forget all models, and keep the memory for the next ones."""
        self.clients = 0
        self._totals = dict.fromkeys(self._sums, Fraction(0))
        self._is_whole = True

    @property
    def weight(self) -> float:
        """The sum of the weights."""
        return float(max(self._totals.values()))

    def add(self, arrays: Arrays, weight: float = 1) -> None:
        """Add a model.

        Parameters
        ----------
        arrays : list, tuple or dict of arrays
            With the keys, shapes and dtypes of `like`; the libraries may differ. An array that is
            not contiguous is copied first, one array at a time.
        weight : int or float
            At least 0, such as a client's number of examples.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            The weight is negative, NaN or infinite, or too large or small for the sums' dtype; an
            array is missing, or has another shape or dtype. Nothing has been added.
        """
        self._check_whole()
        factors = {wide: _factor(weight, total, wide) for wide, total in self._totals.items()}
        given = self._layout.check(arrays, "arrays")
        if any(factors.values()):
            with self._changing():
                self._add(given, factors)
        self.clients += 1

    def _add(self, given: list[Any], factors: dict[str, float]) -> None:
        for leaf, array in zip(self._layout.leaves, given, strict=True):
            total = self._sums[leaf.wide][leaf.first : leaf.last]
            buffer = source_of(array).buffer
            is_first = not self._totals[leaf.wide]
            factor = factors[leaf.wide]
            add_scaled(total, buffer.address, buffer.dtype, factor, is_first=is_first)
        for wide, of_wide in factors.items():
            self._totals[wide] += Fraction(of_wide)

    def all_reduce(self, comm: Communicator) -> None:
        """Add the models of all ranks, so that each rank has the mean over all. Collective.

        The sums are added by one all_reduce in place for each dtype: on one host in the order of
        the ranks, each rank's models in the order in which it has added them. A rank may have added
        none.

        Raises
        ------
        ArgumentError, MismatchError, StateError
            On every rank, before anything moves: the ranks have different arrays, or one of them
            has an error of its own.
        PeerLostError, DeadlineError, AbortedError
            As all_reduce does. The sums are lost: call `reset`, and add the models again.
        """
        check_communicator(comm)
        problem = None
        try:
            self._check_whole()
        except StateError as error:
            problem = error
        offered = self.clients, self._totals
        found = agree(comm, "all_reduce", problem, self._layout.settings(), offered)
        totals = {wide: sum((of[wide] for _, of in found), Fraction(0)) for wide in self._sums}
        for wide, total in totals.items():
            if total > float(np.finfo(wide).max):
                raise ArgumentError(
                    f"all_reduce: the weights of all ranks add up to more than {wide} holds, in "
                    "which the arrays are added up: divide all weights by a common factor"
                )
        with self._changing():
            for wide, sums in self._sums.items():
                if not self._totals[wide]:
                    sums.fill(-0.0)  # what is added to it keeps its bits, -0.0 too
                comm.all_reduce(sums, out=sums)
        self.clients = sum(clients for clients, _ in found)
        self._totals = totals

    def result(self, out: Arrays = None) -> Arrays:
        """Return the mean of the models so far. More may be added afterwards.

        Parameters
        ----------
        out : list, tuple or dict of arrays, optional
            The arrays to write to. Default: new ones. JAX's cannot be written.

        Returns
        -------
        list, tuple or dict of arrays
            As `like`, of its libraries and dtypes.

        Raises
        ------
        StateError
            Nothing has been added, or all weights are 0.
        ArgumentError, ArgumentTypeError
            `out` has other arrays, or some that cannot be written.
        """
        self._check_whole()
        if not self.clients:
            raise StateError("the mean of no model: call add(arrays, weight) first")
        if not all(self._totals.values()):
            raise StateError(f"the weights of all {self.clients} models are 0: there is no mean")
        leaves = self._layout.leaves
        outs = [None] * len(leaves) if out is None else self._layout.check(out, "out")
        places = [
            destination_of(leaf.template, leaf.template.shape, array)
            for leaf, array in zip(leaves, outs, strict=True)
        ]
        for leaf, place in zip(leaves, places, strict=True):
            total = self._sums[leaf.wide][leaf.first : leaf.last]
            _divide(total, float(self._totals[leaf.wide]), place.buffer)
        return self._layout.structure([place.finish() for place in places])

    def _check_whole(self) -> None:
        if not self._is_whole:
            raise StateError("a call of add or all_reduce was interrupted: call reset() first")

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Leave a mark if what is done in this context does not end."""
        self._is_whole = False
        yield
        self._is_whole = True


def _factor(weight: Any, total: Fraction, wide: str) -> float:
    """Return a weight rounded to the sums' dtype; raise unless it can be added to a total."""
    if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
        raise ArgumentTypeError(f"weight must be a number; got {weight!r}")
    try:
        value = float(weight)
    except OverflowError:
        value = math.inf
    if not 0 <= value < math.inf:
        raise ArgumentError(f"weight must be at least 0 and finite; got {weight}")
    least, most = float(np.finfo(wide).tiny), float(np.finfo(wide).max) / 2
    if value and not (value >= least and total + Fraction(value) <= most):
        raise ArgumentError(
            f"weight {weight} is out of the range of {wide}, in which the arrays are added up: "
            "divide all weights by a common factor"
        )
    return float(np.dtype(wide).type(value))


def _divide(total: npt.NDArray[Any], by: float, to: Buffer) -> None:
    """Write ``total / by`` to the memory of an array, chunk by chunk if it is narrower."""
    divisor = total.dtype.type(by)
    with np.errstate(all="ignore"):
        if to.dtype == total.dtype.name:
            np.divide(total, divisor, out=array_at(to.address, total.shape, total.dtype))
            return
        chunk = np.empty(min(_CHUNK, total.size), total.dtype)
        for first in range(0, total.size, _CHUNK):
            part = total[first : first + _CHUNK]
            divided = np.divide(part, divisor, out=chunk[: part.size])
            narrow(divided, to.address + first * to.item_bytes, to.dtype)
