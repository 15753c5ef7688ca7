"""What the ops of a graph call: a collective with its options, on a communicator."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import tensorflow as tf

from gpucoll import Communicator
from gpucoll.collectives import NO_ROOT, Collective
from gpucoll.errors import (
    AbortedError,
    ArgumentError,
    ArgumentTypeError,
    DeadlineError,
    GpucollError,
    MismatchError,
    PeerLostError,
    StateError,
)
from gpucoll.integrations.tensorflow.c_api import Code, OperationError
from gpucoll.types import DTYPES, ReduceOp

if TYPE_CHECKING:
    AnyArray: TypeAlias = np.ndarray[Any, Any]

__all__ = [
    "AUTO",
    "SERVED",
    "CallSite",
    "Counts",
    "as_operation_error",
    "site_of",
    "site_with",
    "use",
]

Counts: TypeAlias = "Sequence[int] | None"
AUTO = "auto"
SERVED = tuple(x for x in DTYPES if not x.startswith("float8"))
"""Dtypes of tensors. TensorFlow cannot parse the names of float8 in an op's definition."""
_CODES = (
    ((MismatchError, StateError), Code.FAILED_PRECONDITION),
    ((ArgumentError, ArgumentTypeError), Code.INVALID_ARGUMENT),
    (DeadlineError, Code.DEADLINE_EXCEEDED),
    ((PeerLostError, AbortedError), Code.ABORTED),  # TensorFlow turns UNAVAILABLE into INTERNAL
    (GpucollError, Code.INTERNAL),
)


class CallSite:
    """A collective with its options, on a communicator: what an op calls when it runs.

    Attributes
    ----------
    key : int
        The number by which graphs of this process name it.
    exchanges_counts : bool
        Whether the ranks tell each other their rows first.
    order : tensor
        The handle of a variable that belongs to the communicator. Every op takes it. TensorFlow
        runs operations that may change a variable one at a time, in the order of the program, also
        through loops, branches and functions that functions call.
    """

    def __init__(
        self,
        key: int,
        comm: Communicator,
        order: Any,
        collective: Collective,
        op: ReduceOp | None,
        root: int,
        counts: Counts,
        exchanges_counts: bool,
    ) -> None:
        self.key, self.variable, self.order = key, order, order.handle
        self.collective, self.op, self.root, self.counts = collective, op, root, counts
        self.exchanges_counts = exchanges_counts
        self.rank, self.world_size = comm.rank, comm.world_size
        self.gets = collective.gets(self.rank, root)
        self._comm = weakref.ref(comm)
        self._served: set[Any] = set()

    @property
    def comm(self) -> Communicator:
        """The communicator; raise StateError if it is gone or closed."""
        comm = self._comm()
        if comm is None or comm.is_closed:
            raise _closed(self.collective.spelled)
        return comm

    def check(self, dtype: Any) -> None:
        """Raise ArgumentTypeError if the collective does not serve a dtype of TensorFlow's."""
        if dtype in self._served:
            return
        if dtype.name not in SERVED:
            raise ArgumentTypeError(
                f"{self.collective.spelled} does not take tensors of {dtype.name}; convert them "
                "(tf.cast, tf.bitcast), or pass other objects to comm.broadcast_object and the "
                f"like. Supported are: {', '.join(SERVED)}"
            )
        if self.op is not None:
            self.op.check_dtype(dtype.name)
        self._served.add(dtype)

    def rows(self, n_rows: int, counts: Counts = None) -> int:
        """Return the number of rows of a result.

        Parameters
        ----------
        n_rows : int
            Those of the input.
        counts : sequence of int, optional
            The rows of every rank's block; None if they are equal.
        """
        if not self.gets:
            return 0
        if counts is not None:
            return counts[self.rank] if self.collective.spreads else sum(counts)
        factor, divisor = self.collective.rows_factor(self.world_size)
        if n_rows % divisor:
            raise ArgumentError(
                f"{self.collective.spelled}: {n_rows} rows cannot be divided among "
                f"{self.world_size} ranks; pass counts= (all_to_all: splits=), or pad x"
            )
        return n_rows * factor // divisor

    def result_shape(self, shape: Sequence[int], counts: Counts = None) -> tuple[int, ...]:
        """Return the shape of a result.

        Parameters
        ----------
        shape, counts
            Of the input; as for `rows`.
        """
        if not self.collective.has_blocks:
            return tuple(shape)
        if not shape:
            if self.collective.spreads:
                raise ArgumentError(f"{self.collective.spelled}: x has no rows; got a scalar")
            shape = (1,)
        return (self.rows(shape[0], counts), *shape[1:])

    def counts_of(self, x: AnyArray) -> Counts:
        """Return the rows of every rank's block of a call, which the ranks may have to exchange."""
        if not self.exchanges_counts:
            return self.counts
        rows: Sequence[int] = self.comm.all_gather(np.array([len(x) if x.ndim else 1])).tolist()
        return rows

    def run(self, x: AnyArray, y: AnyArray, counts: Counts = None) -> None:
        """Call the collective: from x into y."""
        collective, comm = self.collective, self.comm
        options: dict[str, Any] = {} if self.op is None else {"op": self.op}
        if collective.has_root:
            options["root"] = self.root
        if counts is not None:
            options["counts"] = counts
        if x.ndim == 0 and collective.gathers:
            x = x.reshape(1)
        if self.gets:
            options["out"] = y
        getattr(comm, collective.spelled)(x, **options)
        if not self.gets and not collective.has_blocks:
            y[...] = 0

    def run_list(self, xs: list[AnyArray], ys: list[AnyArray]) -> None:
        """Call the collective with a list: one call for each dtype."""
        options: dict[str, Any] = {} if self.op is None else {"op": self.op}
        if self.collective.has_root:
            options["root"] = self.root
        getattr(self.comm, self.collective.spelled)(xs, out=ys if self.gets else None, **options)
        if not self.gets:
            for y in ys:
                y[...] = 0


_default: Communicator | None = None
_sites: dict[int, CallSite] = {}
_known: weakref.WeakKeyDictionary[Communicator, dict[Any, CallSite]] = weakref.WeakKeyDictionary()
_orders: weakref.WeakKeyDictionary[Communicator, Any] = weakref.WeakKeyDictionary()
_keys = itertools.count(1)


def use(comm: Communicator | None) -> None:
    """Set the communicator of calls that are given none.

    Parameters
    ----------
    comm : Communicator or None
        None: such calls are errors again.
    """
    global _default
    if comm is not None and not isinstance(comm, Communicator):
        raise ArgumentTypeError(f"use takes a communicator of gpucoll.init; got {comm!r}")
    _default = comm


def site_of(
    comm: Communicator | None,
    collective: Collective,
    op: str | ReduceOp | None = None,
    root: int = NO_ROOT,
    counts: Counts | str = None,
) -> CallSite:
    """Return the site of these options, one object for equal ones.

    Raises
    ------
    StateError
        There is no communicator, or it is closed.
    ArgumentError, ArgumentTypeError
        An option is wrong.
    """
    given = _default if comm is None else comm
    try:
        site = _known[given][collective, op, root, counts]  # type: ignore[index]  # None is an error
    except (KeyError, TypeError):
        return _made(given, collective, op, root, counts)
    _ = site.comm  # an error if it is closed
    return site


def site_with(key: int) -> CallSite:
    """Return the site that a graph of this process names."""
    return _sites[key]


def as_operation_error(error: Exception) -> OperationError:
    """Return an error as TensorFlow's class of it, with its text."""
    for classes, code in _CODES:
        if isinstance(error, classes):
            return OperationError(code, f"{type(error).__name__}: {error}")
    return OperationError(Code.INTERNAL, repr(error))


def _made(
    comm: Communicator | None,
    collective: Collective,
    op: str | ReduceOp | None,
    root: int,
    counts: Counts | str,
) -> CallSite:
    name = collective.spelled
    if comm is None:
        raise StateError(
            f"{name}: there is no communicator: pass comm=, or call "
            "gpucoll.integrations.tensorflow.use(gpucoll.init()) first"
        )
    if not isinstance(comm, Communicator):
        raise ArgumentTypeError(f"{name}: comm must be a gpucoll.Communicator; got {comm!r}")
    if comm.is_closed:
        raise _closed(name)
    if collective.has_root and not (isinstance(root, int) and 0 <= root < comm.world_size):
        raise ArgumentError(f"{name}: root must be a rank, 0 to {comm.world_size - 1}; got {root}")
    if counts == AUTO and collective.spreads:
        raise ArgumentError(f"{name}: counts must be numbers, which every rank passes")
    rows = _checked_counts(name, counts, comm.world_size)
    if comm not in _orders:
        with tf.init_scope(), tf.device("CPU:0"):
            _orders[comm] = tf.Variable(0.0, trainable=False, name="gpucoll_order")
    parsed = ReduceOp.parse(op) if collective.reduces else None
    known = _known.setdefault(comm, {})
    exchanges = counts == AUTO
    site = known.get((collective, parsed, root, rows, exchanges))
    if site is None:
        order = _orders[comm]
        site = CallSite(next(_keys), comm, order, collective, parsed, root, rows, exchanges)
        _sites[site.key] = known[collective, parsed, root, rows, exchanges] = site
    if isinstance(counts, tuple | str | None):
        known[collective, op, root, counts] = site
    return site


def _closed(name: str) -> StateError:
    return StateError(
        f"{name}: the communicator of this op is closed; pass an open one as comm= (or to use), "
        "and make the tf.functions anew that were traced with the closed one"
    )


def _checked_counts(name: str, counts: Counts | str, world_size: int) -> Counts:
    if counts is None or counts == AUTO:
        return None
    try:
        fixed = tuple(map(int, counts))
    except (TypeError, ValueError):
        fixed = ()
    if len(fixed) != world_size or min(fixed) < 0:
        raise ArgumentError(
            f"{name}: counts must be the rows of each of {world_size} ranks, or 'auto'; "
            f"got {counts!r}"
        )
    return fixed
