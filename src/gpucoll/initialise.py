"""`gpucoll.init`: from nothing to a communicator."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from gpucoll import config
from gpucoll.backends import BACKENDS, PLANNED
from gpucoll.errors import ArgumentError, BackendUnavailableError
from gpucoll.rendezvous.job import Job, find_job

if TYPE_CHECKING:
    from gpucoll.communicator import Communicator

_calls = 0
_lock = threading.Lock()


def init(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    backend: str = "auto",
    timeout_s: float | None = None,
) -> Communicator:
    """Join the job that this process was started in, and return its communicator.

    Parameters
    ----------
    rank, world_size : int, optional
        Who this process is. Default: what gpucoll-run, `gpucoll.launch` or torchrun say in the
        environment; without any of them, one rank alone.
    backend : str
        ``"auto"`` or ``"cpu"``. Other names are refused with the reason.
    timeout_s : float, optional
        Deadline for all ranks to come, and default deadline of every wait afterwards, in seconds.
        Default: ``GPUCOLL_TIMEOUT_S``, or 300.

    Raises
    ------
    RendezvousError
        A rank did not come in time, or runs another version of gpucoll.
    BackendUnavailableError
        The backend cannot serve, or the job spans several hosts.
    MemoryError
        There is no memory for the segment.

    Notes
    -----
    Collective: every rank of the job calls it, as often as the others do. The first call of a
    machine compiles the kernels (about 15 s), later ones load them (about half a second).

    Examples
    --------
    >>> with gpucoll.init() as comm:
    ...     total = comm.all_reduce(x)
    """
    global _calls
    chosen, reason = _choose(backend)
    limit = config.timeout_s() if timeout_s is None else timeout_s
    if not limit > 0:
        raise ArgumentError(f"timeout_s must be positive; got {limit}")
    job = find_job(rank, world_size)
    with _lock:
        number, _calls = _calls, _calls + 1
    from gpucoll.backends.cpu import precompile

    precompile.load()
    from gpucoll.communicator import create

    # Ranks call init equally often: the count keeps the meetings of two calls apart.
    meeting = Job(job.rank, job.world_size, f"{job.token}#{number}", job.origin)
    return create(meeting, limit, limit, chosen, reason)


def _choose(backend: str) -> tuple[str, str]:
    if backend == "auto":
        return "cpu", "chosen by auto; the only backend of this version"
    if backend in BACKENDS:
        return backend, "asked for"
    if backend in PLANNED and config.cpu_only():
        raise BackendUnavailableError(
            f"backend {backend!r} cannot be had: {config.CPU_ONLY} keeps this process on the CPU"
        )
    if backend in PLANNED:
        raise BackendUnavailableError(
            f"backend {backend!r} is not part of this version of gpucoll: it has "
            f"{', '.join(BACKENDS)}. Use backend='auto' and host arrays"
        )
    known = ", ".join(["auto", *BACKENDS])
    raise ArgumentError(f"backend must be one of {known}; got {backend!r}")
