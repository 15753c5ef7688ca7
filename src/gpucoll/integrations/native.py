"""What compiled code of others calls: XLA's handlers, TensorFlow's kernels, MPI's functions.

Such code runs when its framework wants, in threads of the framework, and does not hold the
interpreter. So it has a communicator to itself, a duplicate of the program's: the calls of a graph
that runs asynchronously never meet those that the program makes meanwhile.
`gpucoll.entries.native` has the compiled part.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gpucoll.api.initialise import latest
from gpucoll.arrays.array_kinds import ArrayKind
from gpucoll.arrays.numpy_arrays import array_at, check_dtype, dtype_of, template_of_dtype
from gpucoll.collectives import Collective, Flow
from gpucoll.entries import native
from gpucoll.entries.collectives import EntryTable
from gpucoll.errors import ArgumentError, ArgumentTypeError, StateError
from gpucoll.finalizers import leave
from gpucoll.transport.shared.words import Status
from gpucoll.types import ReduceOp
from gpucoll.wording import rank_of

if TYPE_CHECKING:
    from gpucoll import Communicator

__all__ = ["Door", "Site", "chosen", "door_of"]

Call: TypeAlias = Callable[[int, int, tuple[int, ...]], object]
"""Makes a call, given the addresses of input and output, and the input's shape."""

_TRIES = 3
_TEXTS = 64
"""So many texts of errors stay for those that copy them."""
_PYTHON = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 8)
_restore_error = ctypes.pythonapi.PyErr_Restore
_restore_error.restype, _restore_error.argtypes = None, [ctypes.c_void_p] * 3


def chosen(comm: Communicator | None, what: str) -> Communicator:
    """Return the communicator that a front's call is for: the given one, or that of `init`.

    Raises
    ------
    StateError
        There is none, or it is closed.
    ArgumentTypeError
        It is no communicator.
    """
    from gpucoll import Communicator

    if comm is None:
        comm = latest()
        if comm is None:
            raise StateError(
                f"{what}: this process has no communicator; call comm = gpucoll.init() before and "
                "keep it, or pass comm="
            )
    if not isinstance(comm, Communicator):
        raise ArgumentTypeError(f"{what}: comm must be a gpucoll.Communicator; got {comm!r}")
    if comm.is_closed:
        raise StateError(
            f"{what}: the communicator of {rank_of(comm.rank, comm.world_size)} is closed"
        )
    return comm


class Site:
    """One kind of call of compiled code; made by `Door.site`, and kept for ever.

    Attributes
    ----------
    address : int
        The `gpucoll.entries.native.Site`, with the addresses of the functions to call.
    """

    def __init__(
        self, door: Door, collective: Collective | None, call: Call, given: Sequence[object]
    ) -> None:
        self.door, self.collective, self.call = door, collective, call
        self.dtype: Any
        self.op: Any
        self.root: Any
        self.dtype, self.op, self.root = given
        self.words = words = native.Site.new()
        self.address = int(words.address)
        words.run, words.run_list = native.run_site.address, native.run_list_site.address
        words.door = native.Door(door.words.address)
        words.dtype, words.operation, words.root = map(id, given)


class Door:
    """A communicator for compiled code, and its sites. Get it from `door_of`.

    Attributes
    ----------
    comm : Communicator
        A duplicate of the program's communicator. Calls on it hold `calling`.
    before_close : list of callable
        Called with a deadline in seconds when the program closes its communicator: they wait for
        calls that the framework has yet to make.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm.duplicate()
        self.before_close: list[Callable[[float], object]] = []
        self.words = native.Door.new()
        self.words.main_thread = threading.main_thread().ident or 0
        self._python = _PYTHON(self._call_in_python)
        self.words.python = ctypes.cast(self._python, ctypes.c_void_p).value or 0
        self._sites: dict[int, Site] = {}
        self._known: dict[tuple[object, ...], Site] = {}
        self._unknown = ctypes.create_string_buffer(b"the call was interrupted in Python")
        self.words.unknown = ctypes.addressof(self._unknown)
        self._texts: deque[ctypes.Array[ctypes.c_char]] = deque(maxlen=_TEXTS)
        dispatch = self.comm._collectives.dispatch
        self._is_quick = not (dispatch.refuses_host or dispatch.enqueues_host)

    # --- what is called ---------------------------------------------------------------------------

    def site(
        self,
        collective: str,
        dtype: npt.DTypeLike,
        op: str | ReduceOp | None = None,
        root: int | None = None,
        label: int = 0,
    ) -> Site:
        """Return the site of a collective on host arrays: one for equal arguments.

        Parameters
        ----------
        collective : str
            ``"all_reduce"``, ``"all_reduce_list"``, ``"broadcast"``, ``"reduce"``,
            ``"all_gather"``, ``"gather"``, ``"reduce_scatter"``, ``"scatter"``, ``"all_to_all"``,
            ``"scan"`` or ``"exclusive_scan"``.
        dtype
            Of the elements.
        op, root
            As for the collective; op is ``"sum"`` unless given.
        label : int
            A number that is the same on all ranks and another for each operator of a program:
            ranks whose operators run in different orders then get a MismatchError.

        Raises
        ------
        ArgumentTypeError
            gpucoll has no such dtype, or no such op for it.
        ArgumentError
            The root is no rank.
        """
        kind = Collective[collective.upper()]
        native_dtype = dtype_of(dtype)
        if kind.reduces and op is None:
            op = "sum"
        given = kind, native_dtype, sys.intern(op) if type(op) is str else op, root, label
        site = self._known.get(given)
        return site if site is not None else self._new_site(*given)

    def _new_site(
        self, kind: Collective, dtype: np.dtype[Any], op: Any, root: int | None, label: int
    ) -> Site:
        spelled = kind.spelled
        check_dtype(dtype, spelled)
        if op is not None:
            ReduceOp.parse(op).check_dtype(template_of_dtype(dtype).dtype)
        world_size = self.comm.world_size
        if kind.has_root and not (type(root) is int and 0 <= root < world_size):
            raise ArgumentError(
                f"{spelled}: root must be a rank, 0 to {world_size - 1}; got {root!r}"
            )
        site = Site(self, kind, lambda *where: _call(site, *where), (dtype, op, root))
        site.words.label = label
        site.words.table = EntryTable(
            self.comm._backend.native_table(kind) if self._is_quick else 0
        )
        return self._keep(site, (kind, dtype, op, root, label))

    def python_site(self, call: Call) -> Site:
        """Return the site of a call that Python makes: ``call(source, destination, shape)``."""
        return self._keep(Site(self, None, call, (None, None, None)), (call,))

    def _keep(self, site: Site, key: tuple[object, ...]) -> Site:
        self._known[key] = self._sites[site.address] = site
        return site

    # --- calls that compiled code leaves ----------------------------------------------------------

    def _call_in_python(
        self,
        address: int,
        source: int,
        destination: int,
        n_dimensions: int,
        dimensions: int,
        status: int,
        tries: int,
        raised: int,
    ) -> int:
        """Make a call; return DONE or the address of the error's text. The caller has the mutex.

        Returns AGAIN if compiled code can now make it: on all ranks, so that all compare labels.
        """
        try:
            site = self._sites[address]
            if status == Status.SIGNAL:
                _restore_error(
                    *(word or None for word in (ctypes.c_int64 * 3).from_address(raised))
                )
            self._raise_status(site, status)
            if tries < _TRIES and site.words.table:
                self.comm._group.check_usable()
                self._learn(site)
                return native.AGAIN
            self.comm._collectives.label = int(site.words.label)
            if site.collective is not None and site.collective.is_list:
                _call_list(site, source, n_dimensions)
            else:
                shape = (
                    (ctypes.c_int64 * n_dimensions).from_address(dimensions) if n_dimensions else ()
                )
                site.call(source, destination, tuple(shape))
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C: for the program, not for the framework
                self.words.interrupt = id(type(error))  # a class that Python's handler knows
            return self._text_of(error)
        finally:
            self.comm._collectives.label = 0
        return native.DONE

    def _raise_status(self, site: Site, status: int) -> None:
        """Raise the error of a call that compiled code has made."""
        self.comm._collectives.raise_status(status)
        if self.comm.is_closed:
            raise StateError(
                f"{site.collective.spelled if site.collective else 'a call'}: the communicator of "
                f"{rank_of(self.comm.rank, self.comm.world_size)}, for which this was compiled, is "
                "closed; compile it again for another"
            )

    def _learn(self, site: Site) -> None:
        """Have compiled code make the calls of this site."""
        assert site.collective is not None
        template = template_of_dtype(site.dtype)
        array = ArrayKind(site.dtype, id(site.dtype), template.dtype, template.item_bytes)
        self.comm._backend.learn(site.collective, array, site.op, site.root)

    def _text_of(self, error: BaseException) -> int:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        kept = ctypes.create_string_buffer(text.encode(errors="replace"))
        self._texts.append(kept)
        return ctypes.addressof(kept)

    # --- the end ----------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """Wait for what the framework has yet to call, and close."""
        for function in self.before_close:
            function(timeout_s)
        self.comm.close(timeout_s=timeout_s)

    def give_up(self) -> None:
        """Close without waiting for other ranks; later calls of compiled code fail."""
        self.comm._give_up()


# --- calls on memory at addresses -----------------------------------------------------------------


def _call(site: Site, source: int, destination: int, shape: tuple[int, ...]) -> None:
    """Make the call of a site through the communicator's method."""
    comm, kind, root = site.door.comm, site.collective, site.root
    assert kind is not None
    is_root = root in (None, comm.rank)
    rows = shape[:1]
    if kind.has_blocks:
        multiply, divide = kind.rows_factor(comm.world_size)
        if not shape or shape[0] % divide:
            raise ArgumentError(
                f"{kind.spelled}: the first dimension must be divisible by {divide}, the number of "
                f"ranks; got shape {shape}"
            )
        rows = (shape[0] * multiply // divide,)
    given = {name: value for name, value in (("op", site.op), ("root", root)) if value is not None}
    gives, gets = (kind.flow != flow or is_root for flow in (Flow.FROM_ROOT, Flow.TO_ROOT))
    x = array_at(source, shape, site.dtype) if gives else None
    out = array_at(destination, rows + shape[1:], site.dtype) if gets else None
    if kind is Collective.BROADCAST and not is_root:
        x = out
    getattr(comm, kind.spelled)(x, out=out, **given)


def _call_list(site: Site, arrays: int, count: int) -> None:
    """Make the fused call of a site."""
    rows = [
        native.NativeArray(arrays + number * native.NativeArray.n_bytes) for number in range(count)
    ]
    shapes = [tuple(row.dimensions[axis] for axis in range(row.n_dimensions)) for row in rows]
    pairs = [
        [
            array_at(address, shape, site.dtype)
            for address, shape in zip(addresses, shapes, strict=True)
        ]
        for addresses in ([row.source for row in rows], [row.destination for row in rows])
    ]
    site.door.comm.all_reduce(pairs[0], site.op, out=pairs[1])


_doors: weakref.WeakKeyDictionary[Communicator, Door] = weakref.WeakKeyDictionary()
_kept: list[Door] = []
"""Compiled graphs have addresses in them, for as long as the process lives."""


def door_of(comm: Communicator) -> Door:
    """Return the door of a communicator.

    The first call for a communicator is collective: it duplicates the communicator.
    """
    door = _doors.get(comm)
    if door is None:
        door = Door(comm)
        _kept.append(door)
        _doors[comm] = door
        comm._companions.append(door)
        weakref.finalize(comm, leave, door.give_up).atexit = False
    return door
