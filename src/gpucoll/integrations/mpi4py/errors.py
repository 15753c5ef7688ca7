"""Errors that can be caught as `MPI.Exception` and as the error classes of gpucoll."""

from __future__ import annotations

import re
from typing import NoReturn, SupportsInt

from gpucoll import errors
from gpucoll.integrations.mpi4py.constants import ERR_LASTCODE, ERROR_CLASSES, ERROR_TEXTS

_NAMES = {number: name for name, number in ERROR_CLASSES.items()}
_added: dict[int, tuple[int, str]] = {}
"""Codes and classes that the program has added, with their class and text."""


class Exception(RuntimeError):
    """Error of any failed call. It has an error code and class, and compares like its code."""

    def __init__(self, ierr: int = 0, text: str = "") -> None:
        self._code = int(ierr)
        if self._code != 0 and not text and self._code not in {*_NAMES, *_added}:
            self._code = ERROR_CLASSES["ERR_UNKNOWN"]
        self._text = text
        super().__init__(self._code, text)

    def __str__(self) -> str:
        return f"{self.Get_error_string()}: {self._text}" if self._text else self.Get_error_string()

    def __repr__(self) -> str:
        return f"MPI.Exception({self._code}{f', {self._text!r}' if self._text else ''})"

    def __int__(self) -> int:
        return self._code

    def __bool__(self) -> bool:
        return self._code != 0

    def __hash__(self) -> int:
        return hash(self._code)

    def __eq__(self, other: object) -> bool:
        return self._code == (int(other) if isinstance(other, Exception | int) else other)

    def __lt__(self, other: SupportsInt) -> bool:
        return self._code < int(other)

    def __le__(self, other: SupportsInt) -> bool:
        return self._code <= int(other)

    def __gt__(self, other: SupportsInt) -> bool:
        return self._code > int(other)

    def __ge__(self, other: SupportsInt) -> bool:
        return self._code >= int(other)

    def Get_error_code(self) -> int:
        return self._code

    def Get_error_class(self) -> int:
        return Get_error_class(self._code)

    def Get_error_string(self) -> str:
        return Get_error_string(self._code)

    error_code = property(Get_error_code)
    error_class = property(Get_error_class)
    error_string = property(Get_error_string)


class ArgumentError(Exception, errors.ArgumentError):
    """A value is invalid; no data moved."""


class ArgumentTypeError(Exception, errors.ArgumentTypeError):
    """A type is invalid; no data moved."""


class DatatypeError(Exception, errors.ArgumentError, KeyError):
    """There is no MPI datatype for the argument."""

    __str__ = Exception.__str__


class MemoryLayoutError(Exception, errors.ArgumentError, BufferError):
    """Memory is not contiguous, not writable, or not in native byte order."""


class StateError(Exception, errors.StateError):
    """The call is not allowed in the current state: closed, freed, finalized, or a forked child."""


class MismatchError(Exception, errors.MismatchError):
    """The ranks did not make the same call, or a message does not fit."""


class BackendUnavailableError(Exception, errors.BackendUnavailableError):
    """A backend is not available here."""


class BackendError(Exception, errors.BackendError):
    """A vendor's library or the GPU failed."""


class DeadlineError(Exception, errors.DeadlineError):
    """A wait exceeded its deadline."""


class PeerLostError(Exception, errors.PeerLostError):
    """A rank's process is gone."""


class AbortedError(Exception, errors.AbortedError):
    """A rank aborted the communicator."""


class SharedMemoryError(Exception, errors.SharedMemoryError):
    """The host has too little memory for what the ranks share."""


class RendezvousError(Exception, errors.RendezvousError):
    """The ranks did not find each other."""


class AuthenticationError(Exception, errors.AuthenticationError):
    """The ranks have no secret, or different ones."""


class RendezvousDeadlineError(Exception, errors.RendezvousDeadlineError):
    """A rank did not arrive in time."""


_KINDS: dict[type[errors.GpucollError], tuple[type[Exception], str]] = {
    errors.ArgumentError: (ArgumentError, "ERR_ARG"),
    errors.ArgumentTypeError: (ArgumentTypeError, "ERR_TYPE"),
    errors.StateError: (StateError, "ERR_COMM"),
    errors.MismatchError: (MismatchError, "ERR_NOT_SAME"),
    errors.BackendUnavailableError: (BackendUnavailableError, "ERR_OTHER"),
    errors.BackendError: (BackendError, "ERR_OTHER"),
    errors.DeadlineError: (DeadlineError, "ERR_PENDING"),
    errors.PeerLostError: (PeerLostError, "ERR_PROC_FAILED"),
    errors.AbortedError: (AbortedError, "ERR_PROC_ABORTED"),
    errors.SharedMemoryError: (SharedMemoryError, "ERR_NO_MEM"),
    errors.RendezvousError: (RendezvousError, "ERR_OTHER"),
    errors.AuthenticationError: (AuthenticationError, "ERR_OTHER"),
    errors.RendezvousDeadlineError: (RendezvousDeadlineError, "ERR_OTHER"),
}
_CLASS_BY_TEXT = (
    (re.compile(r"^(dest|source)\b|\b(dest|source) must"), "ERR_RANK"),
    (re.compile(r"\btag\b.*(must|0 to)|^tag\b"), "ERR_TAG"),
    (re.compile(r"\broot\b"), "ERR_ROOT"),
    (re.compile(r"\bop\b|no reduction|works on|is not defined"), "ERR_OP"),
    (re.compile(r"\bcounts?\b"), "ERR_COUNT"),
)


def as_mpis(error: errors.GpucollError, error_class: str = "") -> Exception:
    """Return this module's equivalent of an error of gpucoll's."""
    if isinstance(error, Exception):
        return error
    found = next((kind for base, kind in _KINDS.items() if type(error) is base), None)
    kind, name = found or (Exception, "ERR_OTHER")
    text = str(error)
    if isinstance(error, errors.UsageError) and not error_class:
        error_class = next((name for look, name in _CLASS_BY_TEXT if look.search(text)), name)
    return kind(ERROR_CLASSES[error_class or name], text)


def argument_error(text: str, error_class: str = "ERR_ARG") -> ArgumentError:
    """Return the error for an invalid value."""
    return ArgumentError(ERROR_CLASSES[error_class], text)


def type_error(text: str, error_class: str = "ERR_ARG") -> ArgumentTypeError:
    """Return the error for an invalid type."""
    return ArgumentTypeError(ERROR_CLASSES[error_class], text)


def refused(what: str, instead: str) -> NoReturn:
    """Raise the error for a feature of MPI that this package lacks."""
    raise NotImplementedError(
        f"gpucoll.integrations.mpi4py does not support {what}; {instead} (docs/mpi4py_programs.md "
        "lists what is missing, and why)"
    )


def Get_error_class(errorcode: int) -> int:
    """Return the class of an error code; a predefined code is its own class."""
    if errorcode in _added:
        return _added[errorcode][0]
    return errorcode if errorcode in _NAMES else ERROR_CLASSES["ERR_UNKNOWN"]


def Get_error_string(errorcode: int) -> str:
    """Return the text of an error code."""
    if errorcode in _added:
        return _added[errorcode][1]
    name = _NAMES.get(errorcode, "ERR_UNKNOWN")
    return f"MPI_{name}: {ERROR_TEXTS[name]}"


def Add_error_class() -> int:
    """Return a new error class."""
    number = max([ERR_LASTCODE, *_added]) + 1
    _added[number] = (number, "")
    return number


def Add_error_code(errorclass: int) -> int:
    """Return a new error code of a class."""
    number = max([ERR_LASTCODE, *_added]) + 1
    _added[number] = (errorclass, "")
    return number


def Add_error_string(errorcode: int, string: str) -> None:
    """Set the text of an added code or class."""
    _check_added(errorcode)
    _added[errorcode] = (_added[errorcode][0], string)


def Remove_error_string(errorcode: int) -> None:
    """Remove the text of an added code or class."""
    Add_error_string(errorcode, "")


def Remove_error_class(errorclass: int) -> None:
    """Remove an added class."""
    _check_added(errorclass)
    if any(of == errorclass for code, (of, _) in _added.items() if code != errorclass):
        raise argument_error(f"error class {errorclass} still has codes")
    del _added[errorclass]


def Remove_error_code(errorcode: int) -> None:
    """Remove an added code."""
    _check_added(errorcode)
    if _added[errorcode][1]:
        raise argument_error(f"error code {errorcode} still has a text")
    del _added[errorcode]


def last_used_code() -> int:
    """Return the largest error code in use."""
    return max([ERR_LASTCODE, *_added])


def _check_added(number: int) -> None:
    if number not in _added:
        raise argument_error(f"{number} is not an added error code or class")


__all__ = [name for name in globals() if not name.startswith("_") and name != "builtins"]
