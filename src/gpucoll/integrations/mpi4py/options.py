"""What a program may set before it imports MPI: `rc`."""

from __future__ import annotations

from typing import Any


class Rc:
    """Options; ``rc(name=value, ...)`` sets several.

    Attributes
    ----------
    initialize, finalize : bool
        Whether the import calls Init, and the end of the process Finalize.
    threads, thread_level, fast_reduce, recv_mprobe, irecv_bufsz, errors
        Taken, and without effect: any thread may call, errors are exceptions.
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

    def __init__(self, **options: Any) -> None:
        self(**options)

    def __call__(self, **options: Any) -> None:
        for name in options:
            if not hasattr(type(self), name):
                raise TypeError(f"'mpi4py.rc' has no option {name!r}")
        for name, value in options.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        return "<mpi4py.rc>"


rc = Rc()
