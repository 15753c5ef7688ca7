"""What the ops of a graph call: a collective with its options, on a communicator."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import tensorflow as tf

from gpucoll import Communicator
from gpucoll.collectives import NO_ROOT, Collective
from gpucoll.entries import native
from gpucoll.errors import ArgumentError, ArgumentTypeError, StateError
from gpucoll.integrations.native import chosen, door_of
from gpucoll.types import DTYPES, ReduceOp

if TYPE_CHECKING:
    AnyArray: TypeAlias = np.ndarray[Any, Any]

__all__ = ["AUTO", "SERVED", "CallSite", "Counts", "site_of", "site_with"]

Counts: TypeAlias = "Sequence[int] | None"
AUTO = "auto"
SERVED = tuple(x for x in DTYPES if not x.startswith("float8"))
"""Dtypes of tensors. TensorFlow cannot parse the names of float8 in an op's definition."""


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
        self._program, self._door, self._served = weakref.ref(comm), door_of(comm), set[Any]()
        self._jobs: dict[int, Callable[[], object]] = {}
        self._in_turn = self._door.python_site(lambda number, *_: self._jobs[number]())

    @property
    def comm(self) -> Communicator:
        """A duplicate of the program's communicator, which only ops use."""
        return self._door.comm

    def beside(
        self,
        collective: Collective,
        op: str | ReduceOp | None = None,
        root: int = NO_ROOT,
        counts: Counts | str = None,
    ) -> CallSite:
        """Return the site of another collective on the program's communicator, as `site_of`."""
        comm = self._program()
        if comm is None:
            raise StateError(f"{collective.spelled}: the communicator of its op is gone")
        return site_of(comm, collective, op, root, counts)

    def native(self, dtype: Any, *, is_list: bool) -> int:
        """Return the address of what compiled code calls; 0 if Python must call.

        Parameters
        ----------
        dtype
            Of TensorFlow's.
        """
        collective = self.collective.of_list if is_list else self.collective
        if collective is None or self.counts is not None or self.exchanges_counts:
            return 0
        root = self.root if collective.has_root else None
        name = collective.name.lower()
        return self._door.site(name, dtype.as_numpy_dtype, self.op, root).address

    def in_turn(self, job: Callable[[], object]) -> int:
        """Call a function that calls the communicator, while no compiled code does.

        Returns
        -------
        int
            0, or the address of the text of the function's error.
        """
        number = next(_keys)
        self._jobs[number] = job
        try:
            return int(native.run_site.ctypes(self._in_turn.address, number, 0, 0, 0))
        finally:
            del self._jobs[number]

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


_sites: dict[int, CallSite] = {}
_known: weakref.WeakKeyDictionary[Communicator, dict[Any, CallSite]] = weakref.WeakKeyDictionary()
_orders: weakref.WeakKeyDictionary[Communicator, Any] = weakref.WeakKeyDictionary()
_keys = itertools.count(1)


def site_of(
    comm: Communicator | None,
    collective: Collective,
    op: str | ReduceOp | None = None,
    root: int = NO_ROOT,
    counts: Counts | str = None,
) -> CallSite:
    """Return the site of these options, one object for equal ones.

    The first site of a communicator is made by all its ranks together: they duplicate it.

    Raises
    ------
    StateError
        There is no communicator, or it is closed.
    ArgumentError, ArgumentTypeError
        An option is wrong.
    """
    comm = chosen(comm, collective.spelled)
    try:
        return _known[comm][collective, op, root, counts]
    except (KeyError, TypeError):
        return _made(comm, collective, op, root, counts)


def site_with(key: int) -> CallSite:
    """Return the site that a graph of this process names."""
    return _sites[key]


def _made(
    comm: Communicator,
    collective: Collective,
    op: str | ReduceOp | None,
    root: int,
    counts: Counts | str,
) -> CallSite:
    name = collective.spelled
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
