"""The functions of MPI that jaxlib calls, and the errors of all others."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from gpucoll.arrays.numpy_arrays import array_at
from gpucoll.entries import mpi_functions
from gpucoll.entries.mpi_functions import FIRST_DTYPE, FIRST_OP, N_OPS, Handle
from gpucoll.errors import (
    AbortedError,
    BackendUnavailableError,
    DeadlineError,
    GpucollError,
    PeerLostError,
)
from gpucoll.integrations.jax.processes import members
from gpucoll.integrations.jax.processes.clique import Array, Clique

if TYPE_CHECKING:
    from gpucoll import Work
    from gpucoll.integrations.jax.processes.library import Library
    from gpucoll.integrations.jax.processes.world import World
    from gpucoll.integrations.native import Site

__all__ = ["VALUES", "Functions"]

DTYPES = {
    "FLOAT": "float32",
    "DOUBLE": "float64",
    "C_COMPLEX": "complex64",
    "C_FLOAT_COMPLEX": "complex64",
    "C_DOUBLE_COMPLEX": "complex128",
    "BYTE": "uint8",
    **{f"{kind}{n}_T": f"{kind}{n}".lower() for kind in ("INT", "UINT") for n in (8, 16, 32, 64)},
}
"""The dtype of each of MPI's that jaxlib names. It sends others (bfloat16) as one of these."""
OPS = {"SUM": "sum", "PROD": "prod", "MIN": "min", "MAX": "max"}

_SUCCESS, _THREAD_MULTIPLE, _UNDEFINED, _WORLD = 0, 3, -32766, 0x0FFF
VALUES = {
    **{name: turn for turn, name in enumerate(DTYPES, start=FIRST_DTYPE)},
    **{name: turn for turn, name in enumerate(OPS, start=FIRST_OP)},
    "SUCCESS": _SUCCESS,
    "THREAD_MULTIPLE": _THREAD_MULTIPLE,
    "COMM_WORLD": _WORLD,
    "UNDEFINED": _UNDEFINED & 0xFFFFFFFF,
}
"""The constants that have a meaning here."""

_DTYPE_OF = {VALUES[name]: np.dtype(dtype) for name, dtype in DTYPES.items()}
_OP_OF = {VALUES[name]: op for name, op in OPS.items()}
_MOST_TEXT_BYTES = 511  # jaxlib has room for at least 512
_KEPT_ERRORS = 64
_FIRST_ERROR = 100

_RUN = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 5)
_int, _handle, _pointer = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "Init_thread": (_pointer, _pointer, _int, _pointer),
    "Finalize": (),
    "Is_thread_main": (_pointer,),
    "Error_string": (_int, _pointer, _pointer),
    "Comm_rank": (_handle, _pointer),
    "Comm_size": (_handle, _pointer),
    "Comm_split": (_handle, _int, _int, _pointer),
    "Comm_free": (_pointer,),
    "Allreduce": (_pointer, _pointer, _int, _handle, _handle, _handle),
    "Allgather": (_pointer, _int, _handle, _pointer, _int, _handle, _handle),
    "Reduce_scatter": (_pointer, _pointer, _pointer, _handle, _handle, _handle),
    "Isend": (_pointer, _int, _handle, _int, _int, _handle, _pointer),
    "Irecv": (_pointer, _int, _handle, _int, _int, _handle, _pointer),
    "Wait": (_pointer, _pointer),
    "Sendrecv": (
        *(_pointer, _int, _handle, _int, _int),
        *(_pointer, _int, _handle, _int, _int, _handle, _pointer),
    ),
}
"""The C types of the functions that are served."""


_LOSSES = tuple(error.__name__ for error in (PeerLostError, DeadlineError, AbortedError))
_INTERRUPTS = ("KeyboardInterrupt", "SystemExit")
_SOON_S = 0.02
_COMPILED = "a compiled call"


class _CompiledCallError(Exception):
    """The text of an error of a compiled call, with the error's name."""


class Functions:
    """Everything behind the table of the library.

    Parameters
    ----------
    world : World
        The processes, and how to connect some of them.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._cliques: dict[tuple[int, ...], Clique] = {}
        self._members: dict[int, tuple[Clique, int] | BaseException] = {}
        """The clique and place of each of XLA's communicators, or why it has none.

        By handle: the address of its `Handle`, which is kept as long as the process."""
        self._handles: list[Handle] = []
        self._request_numbers = itertools.count(1)
        self._requests: dict[int, tuple[Work[Any], Array]] = {}
        self._texts: dict[int, str] = {}
        self._error_numbers = itertools.count()
        self._stack: dict[int, int] = {}
        """An address in the stack of each thread that is about to make a communicator."""
        self._lock = threading.Lock()
        self._kept: list[Any] = []
        self._python: dict[str, int] = {}
        self._failed_natively = 0
        self._tables: list[Any] = []
        self.has_lost = False
        """Whether a process is lost, or did not come in time."""

    def fill(self, library: Library) -> None:
        """Fill the table of a library."""
        self._tables.append(library.slots)
        for name, slot in library.functions.items():
            served = _SIGNATURES.get(name)
            if served is not None:
                call, types = getattr(self, f"_{name.lower()}"), served
            elif name == "mpiwrapper_export_fortran_constants_":
                call, types = _nothing, ()
            else:
                call, types = self._refusal_of(name), ()
            self._python[name] = self._address_of(name, call, types)
            library.slots[slot] = self._python[name]
        self._failed_natively = self._address_of(_COMPILED, self._raise_text, (_pointer,))
        for name, compiled in (
            ("Allreduce", mpi_functions.all_reduce),
            ("Allgather", mpi_functions.all_gather),
            ("Reduce_scatter", mpi_functions.reduce_scatter),
        ):
            library.slots[library.functions[name]] = compiled.address

    def _address_of(self, name: str, call: Callable[..., None], types: tuple[Any, ...]) -> int:
        callback = ctypes.CFUNCTYPE(_int, *types)(self._guarded(name, call))
        self._kept.append(callback)
        return ctypes.cast(callback, _pointer).value or 0

    def _refusal_of(self, name: str) -> Callable[..., None]:
        def refuse() -> None:
            raise BackendUnavailableError(
                f"jaxlib calls MPI_{name}, which gpucoll does not have: docs/jax_processes.md "
                "lists the versions of jaxlib that were tried"
            )

        return refuse

    # --- errors -----------------------------------------------------------------------------------

    def _guarded(self, name: str, call: Callable[..., None]) -> Callable[..., int]:
        def guarded(*arguments: Any) -> int:
            try:
                call(*arguments)
            except BaseException as error:
                return self._failed(name, error)
            return _SUCCESS

        return guarded

    def _failed(self, name: str, error: BaseException) -> int:
        """Keep an error's text for `Error_string`, and return its code."""
        text = (
            str(error)
            if isinstance(error, _CompiledCallError)
            else f"{type(error).__name__}: {error}"
        )
        self.has_lost |= text.startswith(_LOSSES)
        if text.startswith(_INTERRUPTS):
            # JAX raises its own error; the program is interrupted, but not before this returns
            threading.Timer(_SOON_S, _interrupt).start()
        if name not in _RETURN_CODES_ARE_READ or len(text.encode()) > _MOST_TEXT_BYTES:
            print(f"gpucoll: in MPI_{name} for JAX: {text}", file=sys.stderr, flush=True)
        with self._lock:
            code = _FIRST_ERROR + next(self._error_numbers) % _KEPT_ERRORS
            self._texts[code] = text
        return code

    def _raise_text(self, text: int) -> None:
        raise _CompiledCallError(ctypes.string_at(text).decode())

    def _error_string(self, code: int, text: int, length: int) -> None:
        found = self._texts.get(code, f"error {code}").encode()[:_MOST_TEXT_BYTES]
        found = found.decode(errors="ignore").encode()
        ctypes.memmove(text, found + b"\0", len(found) + 1)
        _put_int(length, len(found))

    # --- beginning and end ------------------------------------------------------------------------

    def _init_thread(self, _: int, __: int, ___: int, provided: int) -> None:
        _put_int(provided, _THREAD_MULTIPLE)

    def _finalize(self) -> None:
        """Do nothing yet: what runs in XLA's threads goes on until JAX has ended."""

    def _is_thread_main(self, flag: int) -> None:
        """Say that any thread may make a communicator, and note the thread's stack."""
        self._stack[threading.get_ident()] = flag
        _put_int(flag, 1)

    def end(self) -> None:
        """Release all communicators, and empty the table.

        XLA calls MPI even while the interpreter ends, when no callback can run any more.
        """
        with self._lock:
            cliques = list(self._cliques.values())
        for clique in cliques:
            with contextlib.suppress(GpucollError):  # JAX has raised it
                clique.close()
        for slots in self._tables:
            ctypes.memset(slots, 0, ctypes.sizeof(slots))

    # --- communicators ----------------------------------------------------------------------------

    def _comm_rank(self, comm: int, rank: int) -> None:
        _put_int(rank, 0)  # jaxlib does not look whether this fails
        _put_int(rank, self.world.rank if comm == _WORLD else self._member(comm)[1])

    def _comm_size(self, comm: int, size: int) -> None:
        _put_int(size, 1)
        _put_int(size, self.world.size if comm == _WORLD else self._member(comm)[0].size)

    def _comm_split(self, _: int, color: int, key: int, made: int) -> None:
        """Make the communicator of a device. The other devices are found, not waited for.

        jaxlib does not look whether this fails, so a failure waits for the first call.
        """
        handle = self._new_handle(made)
        try:
            clique = self._split(color, key)
            handle.size = clique.size
            self._members[handle.address] = clique, key
        except BaseException as error:
            self._members[handle.address] = error
            raise

    def _new_handle(self, made: int) -> Handle:
        handle = Handle.new()
        handle.failed = self._failed_natively
        handle.all_reduce_in_python = self._python["Allreduce"]
        handle.all_gather_in_python = self._python["Allgather"]
        handle.reduce_scatter_in_python = self._python["Reduce_scatter"]
        with self._lock:
            self._handles.append(handle)
        _put_handle(made, handle.address)
        return handle

    def _split(self, color: int, key: int) -> Clique:
        stack = self._stack.pop(threading.get_ident(), 0)
        processes = self.world.process_of_device()
        devices = members.find(stack, color, key, processes) if stack else None
        if devices is None:
            return self.world.split(color, key)
        name = tuple(devices)
        with self._lock:
            clique = self._cliques.get(name)
            if clique is None:
                clique = self._cliques[name] = self.world.clique(name, processes)
        return clique

    def _member(self, comm: int) -> tuple[Clique, int]:
        found = self._members[comm]
        if isinstance(found, BaseException):
            raise found
        return found

    def _comm_free(self, comm: int) -> None:
        self._members.pop(ctypes.c_size_t.from_address(comm).value, None)

    # --- collectives ------------------------------------------------------------------------------

    def _allreduce(self, x: int, out: int, count: int, dtype: int, op: int, comm: int) -> None:
        clique, place = self._member(comm)
        if clique.is_one_each:
            site = clique.door.site("all_reduce", _DTYPE_OF[dtype], _OP_OF[op])
            Handle(comm).all_reduce_sites[_place_of_site(dtype, op)] = site.address
            _run(site, x, out, count)
            return
        given, result = _array(x, count, dtype), _array(out, count, dtype)
        clique.all_reduce(place, given, result, _OP_OF[op])

    def _allgather(
        self, x: int, count: int, dtype: int, out: int, each: int, dtype_out: int, comm: int
    ) -> None:
        clique, place = self._member(comm)
        if clique.is_one_each and dtype == dtype_out:
            site = clique.door.site("all_gather", _DTYPE_OF[dtype])
            Handle(comm).all_gather_sites[dtype - FIRST_DTYPE] = site.address
            _run(site, x, out, count)
            return
        result = _array(out, each * clique.size, dtype_out)
        clique.all_gather(place, _array(x, count, dtype), result)

    def _reduce_scatter(
        self, x: int, out: int, counts: int, dtype: int, op: int, comm: int
    ) -> None:
        """Serve blocks of one size only, as jaxlib asks for."""
        clique, place = self._member(comm)
        count = _int.from_address(counts).value
        if clique.is_one_each:
            site = clique.door.site("reduce_scatter", _DTYPE_OF[dtype], _OP_OF[op])
            Handle(comm).reduce_scatter_sites[_place_of_site(dtype, op)] = site.address
            _run(site, x, out, count * clique.size)
            return
        given, result = _array(x, count * clique.size, dtype), _array(out, count, dtype)
        clique.reduce_scatter(place, given, result, _OP_OF[op])

    # --- messages ---------------------------------------------------------------------------------

    def _isend(
        self, x: int, count: int, dtype: int, to: int, _: int, comm: int, request: int
    ) -> None:
        clique, place = self._member(comm)
        given = _array(x, count, dtype)
        self._put_request(request, clique.send(place, given, to), given)

    def _irecv(
        self, out: int, count: int, dtype: int, source: int, _: int, comm: int, request: int
    ) -> None:
        clique, place = self._member(comm)
        result = _array(out, count, dtype)
        self._put_request(request, clique.receive(place, result, source), result)

    def _put_request(self, request: int, work: Work[Any], array: Array) -> None:
        number = next(self._request_numbers)
        self._requests[number] = (work, array)
        _put_handle(request, number)

    def _wait(self, request: int, _: int) -> None:
        work, _array = self._requests.pop(ctypes.c_size_t.from_address(request).value)
        work.wait()

    def _sendrecv(
        self,
        x: int,
        count: int,
        dtype: int,
        to: int,
        _: int,
        out: int,
        count_out: int,
        dtype_out: int,
        source: int,
        __: int,
        comm: int,
        ___: int,
    ) -> None:
        clique, place = self._member(comm)
        receiving = clique.receive(place, _array(out, count_out, dtype_out), source)
        clique.send(place, _array(x, count, dtype), to).wait()
        receiving.wait()


_RETURN_CODES_ARE_READ = frozenset(
    {
        *("Allreduce", "Allgather", "Reduce_scatter", _COMPILED),
        *("Isend", "Irecv", "Wait", "Sendrecv"),
    }
)
"""The functions of whose errors jaxlib raises the text. It goes on after those of others."""


def _interrupt() -> None:
    """Send the main thread what Ctrl-C sends: it may sleep by now."""
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, signal.SIGINT)


def _nothing() -> None:
    """Do nothing."""


def _array(address: int | None, count: int, dtype: int) -> Array:
    kind = _DTYPE_OF[dtype]
    return array_at(address, (count if address else 0,), kind)


def _place_of_site(dtype: int, op: int) -> int:
    return (dtype - FIRST_DTYPE) * N_OPS + op - FIRST_OP


def _run(site: Site, x: int, out: int, count: int) -> None:
    """Make the call of a site."""
    dimensions = ctypes.c_int64(count)
    text = _RUN(site.words.run)(site.address, x, out, 1, ctypes.addressof(dimensions))
    if text:
        raise _CompiledCallError(ctypes.string_at(text).decode())


def _put_int(address: int, value: int) -> None:
    _int.from_address(address).value = value


def _put_handle(address: int, value: int) -> None:
    _handle.from_address(address).value = value
