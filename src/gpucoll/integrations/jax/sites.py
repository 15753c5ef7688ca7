"""What a call inside `jax.jit` does: a collective or a message with its options, on a communicator.

A traced function keeps the site of each of its calls. Sites with equal options are one object, so
that JAX finds functions again that it has compiled.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from jax import numpy as jnp

from gpucoll import ANY_SOURCE, ANY_TAG, Communicator, ReduceOp
from gpucoll.arrays.numpy_arrays import array_at
from gpucoll.collectives import NO_ROOT, Collective, Data
from gpucoll.errors import ArgumentError, ArgumentTypeError, StateError
from gpucoll.integrations.jax.ending import flush_before_close
from gpucoll.integrations.native import chosen, door_of
from gpucoll.types import DTYPES

if TYPE_CHECKING:
    from typing import TypeAlias

    Arrays: TypeAlias = Sequence[Any]
    Shape: TypeAlias = tuple[int, ...]

__all__ = ["ALL_REDUCE", "IDENTITY", "Options", "Site", "site_of", "sites"]

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

    def __init__(self, key: int, comm: Communicator, options: Options) -> None:
        self.key, self.options = key, options
        self.rank, self.world_size = comm.rank, comm.world_size
        self._comm = weakref.ref(comm)
        self._door = door_of(comm)
        flush_before_close(self._door)
        self._served: set[str] = set()
        self._messages: dict[Any, Any] = {}

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
        """The communicator that the program passed; StateError if it is closed."""
        comm = self._comm()
        if comm is None:
            raise StateError(f"{self.options.spelled}: the communicator of this call is closed")
        return chosen(comm, self.options.spelled)

    @property
    def gets(self) -> bool:
        """Whether this rank has a result."""
        if self.options.collective in (Collective.SEND, Collective.RECV):
            return self.options.source is not None
        has_data = self.options.collective is not Collective.BARRIER
        return has_data and self.options.collective.gets(self.rank, self.options.root)

    @property
    def is_labelled(self) -> bool:
        """Whether ranks compare the number that the call has in its program."""
        return self.options.collective.data == Data.ARRAYS

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
        if not collective.has_blocks:
            return shape
        if not shape:
            raise ArgumentError(f"{self.options.spelled}: x has no rows; got a scalar")
        factor, divisor = collective.rows_factor(self.world_size)
        if shape[0] % divisor:
            raise ArgumentError(
                f"{self.options.spelled}: {shape[0]} rows cannot be divided equally among "
                f"{self.world_size} ranks; pad x"
            )
        return (shape[0] * factor // divisor, *shape[1:])

    # --- what compiled programs call --------------------------------------------------------------

    def address_of(self, operands: Sequence[Any], results: Sequence[Any], label: int) -> int:
        """Return the address of what the handler on CPUs calls.

        Parameters
        ----------
        operands, results : sequence
            What is sent and what is received: objects with shape and dtype.
        label : int
            The number of the call in its program, which ranks compare.
        """
        what, door = self.options, self._door
        if not self.is_labelled:
            kinds = tuple((x.shape, jnp.dtype(x.dtype)) for x in (*operands, *results))
            found = self._messages.get(kinds)
            if found is None:
                call = _HostMessage(self, operands, results)
                found = self._messages[kinds] = door.python_site(call)
        else:
            name = what.collective.name.lower() + ("_list" if len(operands) > 1 else "")
            root = what.root if what.collective.has_root else None
            found = door.site(name, operands[0].dtype, what.op, root, label)
        return found.address

    def run(self, sources: Arrays, results: Arrays, **options: Any) -> None:
        """Make the call: from arrays into arrays.

        Raises
        ------
        GpucollError
            It failed.
        """
        what, comm = self.options, self._door.comm
        if what.collective is Collective.BARRIER:
            comm.barrier()
        elif what.source is not None:
            pending = comm.recv(results[0], what.source, what.recv_tag, async_op=True, **options)
            if what.dest is not None:
                comm.send(sources[0], what.dest, what.tag, **options)
            pending.wait()
            if what.on_message is not None:
                what.on_message(pending.message)
        elif what.dest is not None:
            comm.send(sources[0], what.dest, what.tag, **options)
        else:
            if what.op is not None:
                options["op"] = what.op
            if what.collective.has_root:
                options["root"] = what.root
            is_list = len(sources) > 1
            if self.gets:
                options["out"] = list(results) if is_list else results[0]
            x = list(sources) if is_list else sources[0]
            getattr(comm, what.collective.spelled)(x, **options)


class _HostMessage:
    """A message, or a barrier, of arrays in host memory."""

    def __init__(self, site: Site, operands: Sequence[Any], results: Sequence[Any]) -> None:
        self._site = site
        self._kinds = [
            [(x.shape, jnp.dtype(x.dtype)) for x in some] for some in (operands, results)
        ]

    def __call__(self, source: int, destination: int, shape: tuple[int, ...]) -> None:
        sent, received = self._kinds
        self._site.run(
            [array_at(source, *kind) for kind in sent],
            [array_at(destination, *kind) for kind in received],
        )


_known: weakref.WeakKeyDictionary[Communicator, dict[Options, Site]] = weakref.WeakKeyDictionary()
_keys = itertools.count(1)
sites: dict[int, Site] = {}
"""All, by their keys: kept, since compiled programs name them."""


def site_of(comm: Communicator, options: Options) -> Site:
    """Return the site of these options, one object for equal ones.

    Raises
    ------
    ArgumentError
        A rank or a tag is out of range.
    """
    known = _known.setdefault(comm, {})
    try:
        site = known.get(options)
    except TypeError:  # a root, say, that is traced; `_check` says so
        site = None
    if site is None or options.on_message is not None:
        _check(comm, options)
        site = Site(next(_keys), comm, options)
        sites[site.key] = known[options] = site
    return site


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
