"""What a call inside `jax.jit` does: a collective or a message with its options, on a communicator.

A traced function keeps the site of each of its calls. Sites with equal options are one object, so
that JAX finds functions again that it has compiled.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gpucoll import ANY_SOURCE, ANY_TAG, Communicator, ReduceOp
from gpucoll.collectives import NO_ROOT, Collective
from gpucoll.errors import ArgumentError, ArgumentTypeError, StateError
from gpucoll.types import DTYPES

if TYPE_CHECKING:
    from typing import TypeAlias

    Arrays: TypeAlias = Sequence[Any]
    Shape: TypeAlias = tuple[int, ...]

__all__ = ["ALL_REDUCE", "IDENTITY", "Options", "Site", "communicator", "site_of", "use"]

ALL_REDUCE, IDENTITY = "all_reduce", "identity"
"""What a gradient of an all_reduce is: the sum of all ranks' cotangents, or a rank's own."""


@dataclass(frozen=True)
class Options:
    """What a call does, apart from its arrays.

    Attributes
    ----------
    collective : Collective
        `Collective.SEND` with both `dest` and `source` is a send_recv.
    op : ReduceOp or None
    root, dest, source, tag, recv_tag : int
    gradient : str
        Of an all_reduce: `ALL_REDUCE` or `IDENTITY`.
    on_message : callable or None
        Called with the `Message` of each receive.
    """

    collective: Collective
    op: ReduceOp | None = None
    root: int = NO_ROOT
    dest: int | None = None
    source: int | None = None
    tag: int = 0
    recv_tag: int = 0
    gradient: str = ALL_REDUCE
    on_message: Any = field(default=None, compare=False)

    @property
    def spelled(self) -> str:
        """The name of the function."""
        if self.collective is not Collective.SEND:
            return self.collective.spelled
        return "send" if self.source is None else "send_recv"


class Site:
    """A collective or a message with its options, on a communicator.

    Attributes
    ----------
    key : int
        The number by which compiled programs name it.
    options : Options
    comm : Communicator
        The communicator that the program passed.
    rank, world_size : int
    """

    def __init__(self, key: int, comm: Communicator, lane: Lane, options: Options) -> None:
        self.key, self.options, self.lane = key, options, lane
        self.rank, self.world_size = comm.rank, comm.world_size
        self._comm = weakref.ref(comm)
        self._served: set[str] = set()

    def __repr__(self) -> str:
        options = self.options
        words = [options.op.name] if options.op else []
        for name in ("root", "dest", "source"):
            value = getattr(options, name)
            if value is not None and (name != "root" or value != NO_ROOT):
                words.append(f"{name}={value}")
        return f"{options.spelled}({', '.join(words)})"

    @property
    def comm(self) -> Communicator:
        """The communicator that the program passed.

        Raises
        ------
        StateError
            It is closed.
        """
        comm = self._comm()
        if comm is None or comm.is_closed:
            raise _closed(self.options.spelled)
        return comm

    @property
    def gets(self) -> bool:
        """Whether this rank has a result."""
        if self.options.collective in (Collective.SEND, Collective.RECV):
            return self.options.source is not None
        has_data = self.options.collective is not Collective.BARRIER
        return has_data and self.options.collective.gets(self.rank, self.options.root)

    @property
    def result_is_template(self) -> bool:
        """Whether the last operand says what the result is like, and is not sent."""
        return self.options.source is not None

    def check_dtype(self, dtype: Any) -> None:
        """Raise ArgumentTypeError if the call does not serve this dtype."""
        name = str(dtype)
        if name in self._served:
            return
        if self.options.op is not None:
            self.options.op.check_dtype(name)
        elif name not in DTYPES:
            raise ArgumentTypeError(
                f"{self.options.spelled}: arrays of {name} do not travel; convert them first "
                f"(x.astype, jax.lax.bitcast_convert_type, jax.random.key_data). Served are: "
                f"{', '.join(DTYPES)}"
            )
        self._served.add(name)

    def result_shape(self, shape: Shape) -> Shape:
        """Return the shape of the result for an input of this shape.

        Raises
        ------
        ArgumentError
            The rows cannot be divided among the ranks.
        """
        collective = self.options.collective
        if not collective.has_blocks or (collective.knows_one_block and not shape):
            if collective.knows_one_block:
                raise ArgumentError(f"{self.options.spelled}: x has no rows; got a scalar")
            return shape
        if not shape:
            if collective.spreads:
                raise ArgumentError(f"{self.options.spelled}: x has no rows; got a scalar")
            shape = (1,)
        factor, divisor = collective.rows_factor(self.world_size)
        if shape[0] % divisor:
            raise ArgumentError(
                f"{self.options.spelled}: {shape[0]} rows cannot be divided equally among "
                f"{self.world_size} ranks; pad x"
            )
        return (shape[0] * factor // divisor, *shape[1:])

    def run(self, sources: Arrays, results: Arrays, **options: Any) -> None:
        """Make the call: from arrays into arrays.

        Raises
        ------
        GpucollError
            The call failed, or the communicator is closed.
        """
        what = self.options
        self.comm  # noqa: B018 - raises if it is closed
        lane = self.lane
        if not lane.lock.acquire(blocking=False):
            raise StateError(
                f"{what.spelled}: rank {self.rank} runs another call on this communicator, in "
                "another thread; give each thread that runs jitted functions a communicator of "
                "its own (comm.duplicate())"
            )
        try:
            comm = lane.comm
            if what.collective is Collective.BARRIER:
                comm.barrier()
            elif what.collective in (Collective.SEND, Collective.RECV):
                self._run_message(comm, sources, results, options)
            else:
                self._run_collective(comm, sources, results, options)
        finally:
            lane.lock.release()

    def _run_collective(
        self, comm: Communicator, sources: Arrays, results: Arrays, options: dict[str, Any]
    ) -> None:
        what = self.options
        if what.op is not None:
            options["op"] = what.op
        if what.collective.has_root:
            options["root"] = what.root
        x = sources[0] if len(sources) == 1 else list(sources)
        if len(sources) == 1 and x.ndim == 0 and what.collective.gathers:
            x = x.reshape(1)
        if self.gets:
            options["out"] = results[0] if len(sources) == 1 else list(results)
        getattr(comm, what.collective.spelled)(x, **options)

    def _run_message(
        self, comm: Communicator, sources: Arrays, results: Arrays, options: dict[str, Any]
    ) -> None:
        what = self.options
        if what.source is None:
            comm.send(sources[0], what.dest, what.tag, **options)
            return
        pending = comm.recv(results[0], what.source, what.recv_tag, async_op=True, **options)
        if what.dest is not None:
            comm.send(sources[0], what.dest, what.tag, **options)
        pending.wait()
        if what.on_message is not None:
            what.on_message(pending.message)


class Lane:
    """The communicator on which the calls of compiled programs run: a duplicate of the program's.

    Compiled programs run when JAX sees fit; a communicator of their own keeps their calls apart
    from those that the program makes itself.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm.duplicate()
        self.lock = threading.Lock()
        """Held while a call runs."""


_default: Communicator | None = None
_lanes: weakref.WeakKeyDictionary[Communicator, Lane] = weakref.WeakKeyDictionary()
_known: weakref.WeakKeyDictionary[Communicator, dict[Options, Site]] = weakref.WeakKeyDictionary()
_keys = itertools.count(1)
sites: dict[int, Site] = {}
"""All, by their keys: kept, since compiled programs name them."""


def use(comm: Communicator | None) -> None:
    """Set the communicator of the calls that are given none.

    A collective call: all ranks of `comm` make it, and the calls of jitted functions get a
    duplicate of it.

    Parameters
    ----------
    comm : Communicator or None
        None: calls without ``comm=`` are errors again.

    Raises
    ------
    ArgumentTypeError
        It is no communicator.
    StateError
        It is closed.
    """
    global _default
    if comm is not None:
        _lane_of(communicator("use", comm))
    _default = comm


def communicator(name: str, comm: Communicator | None) -> Communicator:
    """Return the communicator of a call.

    Raises
    ------
    StateError
        There is none, or it is closed.
    ArgumentTypeError
        It is no communicator.
    """
    if comm is None:
        comm = _default
    if comm is None:
        raise StateError(
            f"{name}: there is no communicator: pass comm=, or call "
            "gpucoll.integrations.jax.use(gpucoll.init()) first"
        )
    if not isinstance(comm, Communicator):
        raise ArgumentTypeError(f"{name}: comm must be a gpucoll.Communicator; got {comm!r}")
    if comm.is_closed:
        raise _closed(name)
    return comm


def site_of(comm: Communicator, options: Options) -> Site:
    """Return the site of these options, one object for equal ones.

    Raises
    ------
    ArgumentError
        A rank or a tag is out of range.
    """
    known = _known.setdefault(comm, {})
    site = known.get(options)
    if site is None or options.on_message is not None:
        _check(comm, options)
        site = Site(next(_keys), comm, _lane_of(comm), options)
        sites[site.key] = known[options] = site
    return site


def _lane_of(comm: Communicator) -> Lane:
    lane = _lanes.get(comm)
    if lane is None:
        lane = _lanes[comm] = Lane(comm)
    return lane


def _check(comm: Communicator, options: Options) -> None:
    name = options.spelled
    if options.collective.has_root:
        _check_rank(comm, name, "root", options.root)
    if options.dest is not None:
        _check_rank(comm, name, "dest", options.dest)
    if options.source is not None and options.source != ANY_SOURCE:
        _check_rank(comm, name, "source", options.source)
    for word, tag, least in (("tag", options.tag, 0), ("recv_tag", options.recv_tag, ANY_TAG)):
        if not isinstance(tag, int | np.integer) or isinstance(tag, bool) or not tag >= least:
            raise ArgumentError(f"{name}: {word} must be an int from 0 on; got {tag!r}")
    if options.gradient not in (ALL_REDUCE, IDENTITY):
        raise ArgumentError(
            f"{name}: gradient must be {ALL_REDUCE!r} or {IDENTITY!r}; got {options.gradient!r}"
        )


def _check_rank(comm: Communicator, name: str, word: str, rank: Any) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int | np.integer):
        raise ArgumentTypeError(
            f"{name}: {word} must be an int that is known when the function is traced; got "
            f"{rank!r} (in jax.jit: static_argnums)"
        )
    if not 0 <= rank < comm.world_size:
        raise ArgumentError(
            f"{name}: {word} must be a rank, 0 to {comm.world_size - 1}; got {rank}"
        )


def _closed(name: str) -> StateError:
    return StateError(
        f"{name}: the communicator of this call is closed; pass an open one as comm= (or to use), "
        "and jit the functions anew that were traced with the closed one (jax.clear_caches())"
    )
