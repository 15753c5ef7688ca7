"""Options that a program or its user can set before importing MPI: `rc`, ``MPI4PY_RC_...``."""

from __future__ import annotations

import warnings
from typing import Any

from gpucoll import config


class Rc:
    """The options; ``rc(name=value, ...)`` sets several.

    Attributes
    ----------
    initialize, finalize : bool
        Whether importing MPI calls Init, and the end of the process calls Finalize.
    threads, thread_level, fast_reduce, recv_mprobe, irecv_bufsz, errors
        Accepted without effect: any thread may make calls, and errors are exceptions.
    timeout_s : float or None
        Deadline of every wait, in seconds; None: ``GPUCOLL_TIMEOUT_S``, else a day.
    backend : str
        gpucoll's backend: "auto", "cpu", "nccl", ...
    device : object
        This rank's GPU, as `gpucoll.init` takes it.
    """

    initialize: bool = True
    finalize: bool | None = None
    threads: bool = True
    thread_level: str = "multiple"
    fast_reduce: bool = True
    recv_mprobe: bool = True
    irecv_bufsz: int = 32768
    errors: str = "exception"
    timeout_s: float | None = None
    backend: str = "auto"
    device: Any = None

    def __init__(self, **options: object) -> None:
        self(**options)

    def __call__(self, **options: object) -> None:
        for name in options:
            self._check(name)
        for name, value in options.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        self._check(name)
        super().__setattr__(name, value)

    def _check(self, name: str) -> None:
        if not hasattr(type(self), name):
            raise TypeError(f"'mpi4py.rc' has no option {name!r}")

    def __repr__(self) -> str:
        return "<mpi4py.rc>"


_TRUE, _FALSE = ("true", "yes", "on", "y", "1"), ("false", "no", "off", "n", "0")
_SWITCH = (True, False, "yes", "no")
_VALUES: dict[str, tuple[Any, ...] | None] = {
    "initialize": _SWITCH,
    "threads": _SWITCH,
    "thread_level": ("single", "funneled", "serialized", "multiple"),
    "finalize": (*_SWITCH, None),
    "fast_reduce": _SWITCH,
    "recv_mprobe": _SWITCH,
    "irecv_bufsz": None,
    "errors": ("exception", "default", "abort", "fatal"),
}
"""Valid values of mpi4py's own options; None stands for a number of bytes."""


def settle() -> None:
    """Apply the environment's settings, which override the program's, as in mpi4py.

    An invalid value raises a RuntimeWarning, and the option keeps its default.
    """
    for name, values in _VALUES.items():
        text = config.variable(f"{config.MPI4PY_RC}{name.upper()}")
        if text:
            setattr(rc, name, _read(text, is_number=values is None))
        value = getattr(rc, name)
        if (value not in values) if values else (type(value) is not int or value < 0):
            warnings.warn(f"mpi4py.rc.{name}: unexpected value {value!r}", RuntimeWarning, 2)
            setattr(rc, name, getattr(Rc, name))
        elif value in ("yes", "no"):
            setattr(rc, name, value == "yes")


def _read(text: str, is_number: bool) -> str | int:
    if is_number and text.strip().isdecimal():
        return int(text)
    word = text.lower()
    return word in _TRUE if word in (*_TRUE, *_FALSE) else word


rc = Rc()
