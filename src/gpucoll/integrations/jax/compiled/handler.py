"""The handler that XLA calls on CPUs, compiled: a call does not wait for the interpreter."""

from __future__ import annotations

from gpucoll.blocks import Block, Field, Words
from gpucoll.entries.native import NativeArray, Site
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.kernels.cpu.memory import call_words, load32, signed32
from gpucoll.transport.shared.libc import free, malloc, strdup

__all__ = ["VERSION", "Failed", "handle_call"]

VERSION = 0, 1
"""Of XLA's FFI. Newer versions accept the handlers of older ones, and lay frames out alike."""

# Words of XLA's structures (xla/ffi/api/c_api.h).
_EXTENSION, _API, _STAGE = 1, 2, 4
_N_ARGUMENTS, _ARGUMENTS, _N_RESULTS, _RESULTS, _ATTRIBUTES = 7, 9, 12, 14, 20
_METADATA, _METADATA_VERSION, _VERSION_WORD = 3, 3, VERSION[0] | VERSION[1] << 32
_DATA, _N_DIMENSIONS, _DIMENSIONS = 3, 4, 5
_ERROR_CREATE = 6
_EXECUTE = 3

# XLA's codes of errors, by the first two letters of the class that an error's text begins with.
_INVALID_ARGUMENT, _DEADLINE_EXCEEDED, _FAILED_PRECONDITION = 3, 4, 9
_ABORTED, _INTERNAL, _UNAVAILABLE = 10, 13, 14
_MISMATCH, _STATE, _DEADLINE, _ARGUMENT, _ABORT, _PEER_LOST = (
    first | second << 8 for first, second in (b"Mi", b"St", b"De", b"Ar", b"Ab", b"Pe")
)


class Failed(Block):
    """The error of a call that has no result: JAX tells nobody."""

    text: int  # the address of a copy of it, for `free`, or 0


class _Error(Block):
    """XLA_FFI_Error_Create_Args."""

    size: int
    extension: int
    message: int
    code: int


class _Scalar(Block):
    """XLA_FFI_Scalar."""

    dtype: int
    value: Field[Words]


@inline
def _code_of(text: int) -> int:
    """Return XLA's code of an error."""
    letters = load32(text) & 0xFFFF
    code = _INTERNAL
    if letters == _MISMATCH or letters == _STATE:
        code = _FAILED_PRECONDITION
    elif letters == _DEADLINE:
        code = _DEADLINE_EXCEEDED
    elif letters == _ARGUMENT:  # ArgumentError, ArgumentTypeError
        code = _INVALID_ARGUMENT
    elif letters == _ABORT:
        code = _ABORTED
    elif letters == _PEER_LOST:
        code = _UNAVAILABLE
    return code


@inline
def _error_of(frame: Words, text: int) -> int:
    """Return XLA's form of an error."""
    address = malloc(_Error.n_bytes)
    error = _Error(address)
    error.size = _Error.n_bytes
    error.extension = 0
    error.message = text
    error.code = _code_of(text)
    made = call_words(Words(frame[_API])[_ERROR_CREATE], address, 0, 0, 0, 0, 0, 0, 0)
    free(address)
    return made


@inline
def _attribute(frame: Words, number: int) -> int:
    """Return the value of an attribute; XLA sorts them by name."""
    return _Scalar(Words(frame[_ATTRIBUTES])[number]).value[0]


@inline
def _fill_row(row: NativeArray, source: Words, result: Words) -> None:
    row.source = source[_DATA]
    row.destination = result[_DATA]
    row.n_dimensions = source[_N_DIMENSIONS]
    row.dimensions = Words(source[_DIMENSIONS])


@inline
def _run_list(site: Site, frame: Words, count: int) -> int:
    """Make the call for a list of arrays; return the address of the error's text, or 0."""
    address = malloc(count * NativeArray.n_bytes)
    rows = NativeArray(address)
    for number in range(count):
        source = Words(Words(frame[_ARGUMENTS])[number])
        _fill_row(rows[number], source, Words(Words(frame[_RESULTS])[number]))
    text = call_words(site.run_list, site, address, count, 0, 0, 0, 0, 0)
    free(address)
    return text


@inline
def _run(site: Site, frame: Words) -> int:
    """Make the call; return the address of the error's text, or 0.

    The last of the arguments and of the results is a token.
    """
    n_arguments, n_results = frame[_N_ARGUMENTS] - 1, frame[_N_RESULTS] - 1
    if n_arguments > 1:
        return _run_list(site, frame, n_arguments)
    source, destination, n_dimensions, dimensions = 0, 0, 0, 0
    if n_results > 0:
        result = Words(Words(frame[_RESULTS])[0])
        destination = result[_DATA]
        n_dimensions, dimensions = result[_N_DIMENSIONS], result[_DIMENSIONS]
    if n_arguments > 0:
        argument = Words(Words(frame[_ARGUMENTS])[0])
        source = argument[_DATA]
        n_dimensions, dimensions = argument[_N_DIMENSIONS], argument[_DIMENSIONS]
    return call_words(site.run, site, source, destination, n_dimensions, dimensions, 0, 0, 0)


@compiled_when_used()
def handle_call(frame: Words) -> int:
    """Make the call of a custom call of XLA; return 0, or the address of XLA's error.

    Parameters
    ----------
    frame : Words
        An XLA_FFI_CallFrame. Its attributes are ``failed``, the address of a `Failed` or 0, and
        ``site``, the address of a `Site`.
    """
    if frame[_EXTENSION] != 0:  # XLA asks for which version this was written
        metadata = Words(Words(frame[_EXTENSION])[_METADATA])
        metadata[_METADATA_VERSION] = _VERSION_WORD
        return 0
    if signed32(frame[_STAGE]) != _EXECUTE:
        return 0
    text = _run(Site(_attribute(frame, 1)), frame)
    if text == 0:
        return 0
    failed = _attribute(frame, 0)
    if failed != 0 and Failed(failed).text == 0:
        Failed(failed).text = strdup(text)  # the text itself does not stay
    return _error_of(frame, text)
