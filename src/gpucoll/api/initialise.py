"""`gpucoll.init`: from nothing to a communicator."""

from __future__ import annotations

import contextlib
import importlib.util
from typing import TYPE_CHECKING, Any

from gpucoll import config
from gpucoll.api.parameters import parse
from gpucoll.backends.choice import MPI
from gpucoll.dependencies import check_dependencies
from gpucoll.errors import ArgumentError
from gpucoll.rendezvous.ended_ranks import LauncherWatch
from gpucoll.rendezvous.job import Job, find_job, spread_by_mpi
from gpucoll.tracebacks import shorten_uncaught

if TYPE_CHECKING:
    from gpucoll.api.communicator import Communicator


def init(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    meet: Any = None,
    name: str | None = None,
    backend: str = "auto",
    device: Any = None,
    mixed: bool = False,
    timeout_s: float | None = None,
    on_async_error: str | None = None,
    deterministic: str | None = None,
    bind: bool = False,
) -> Communicator:
    """Join the job that this process was started in, and return its communicator.

    Parameters
    ----------
    rank, world_size : int, optional
        Who this process is. Default: what gpucoll-run, `gpucoll.launch`, torchrun, the mpiexec of
        Open MPI, MPICH or Intel MPI, or srun say in the environment; without any of them, one rank
        alone. Where they are given, they go before what a launcher says.
    meet : str or store, optional
        Where ranks on several hosts meet: ``"tcp://HOST:PORT"`` of rank 0's host, ``"file://PATH"``
        on a file system that they share, or a store with ``set`` and ``get``, as torch's. Default:
        ``GPUCOLL_MEET``, then what torchrun or Slurm say. Ranks on several hosts need the
        job's secret, in ``GPUCOLL_SECRET`` or ``GPUCOLL_SECRET_FILE``, or from the store's
        ``secret()``, where it has that.
    name : str, optional
        Of those that meet, where some of the launched ranks do by themselves, with `rank` and
        `world_size` among them: each group has a name of its own, and the calls of init with one
        name are counted apart from all others. Default: all ranks of the job.
    backend : str
        The same on all ranks. ``"auto"``: host arrays go through shared memory, GPU arrays through
        the vendor's library where every rank has a GPU of its own, else through ``"direct"``
        without one; `Communicator.describe` says what was chosen and why. ``"cpu"``: host arrays
        only. ``"mpi"``: host arrays through MPI, by mpi4py, whose ranks these are. ``"nccl"``,
        ``"rccl"``, ``"direct"``: GPU arrays only, connected at once.
    device : int, str or device, optional
        This rank's GPU: its number, ``"cuda:1"``, or a device of CuPy or PyTorch. The ranks' GPUs
        are then connected at once; without a GPU for every rank that is an error. Default: at the
        first collective call on GPU arrays, and the GPU is theirs, so the same program runs without
        one.
    mixed : bool
        Whether host and GPU arrays may meet in one call: NVIDIA, AMD and CPU ranks in one
        communicator. The same on all ranks, with backend ``"auto"`` or ``"direct"``. A rank without
        a GPU passes host arrays; one with a GPU passes either. Then every call on arrays goes
        through the direct backend, and what they have is connected at once. On a rank without a GPU
        `device` counts for nothing.
    timeout_s : float, optional
        Deadline for all ranks to come, and default deadline of every wait afterwards, in seconds.
        Default: ``GPUCOLL_TIMEOUT_S``, or 300.
    on_async_error : {"raise", "exit"}, optional
        What a failure on the GPU does that is found beside the program: be raised by its next call,
        or also end the process, with the reason on stderr, where it has not asked within 2 s. With
        ``"exit"`` the exit code is 1, too, where the program ends without having waited for an
        asynchronous call on host arrays that failed; the reason is on stderr in any case.
        Default: ``"exit"`` under a launcher, whose job then ends; else ``"raise"``.
    deterministic : {None, "order"}
        ``"order"``: reductions combine the ranks in the order 0 to P-1 everywhere, so that their
        bits depend neither on the size of arrays nor on where ranks are, and half types are rounded
        once. One host's arrays are reduced so in any case. Between hosts and with NCCL and RCCL it
        costs: there every rank's numbers travel to whoever adds them up (``docs/sharp_bits.md``).
        The same on all ranks.
    bind : bool
        Whether to bind each rank to CPUs of its own, as gpucoll-run does: an equal part of those
        that the ranks may use, where there are enough. For launchers that bind nothing (torchrun,
        mpiexec, systemd); ranks that have CPUs of their own stay as they are, and so does
        everything with ``GPUCOLL_BIND=none``. All threads of the process are bound, until it ends;
        `Communicator.describe` says to what.

    Raises
    ------
    RendezvousDeadlineError
        A rank did not come in time.
    RendezvousError
        A rank runs another version of gpucoll, or does not belong to the job; or a launcher has
        left no name by which its ranks could meet: then the message says what to set.
    AuthenticationError
        Ranks on several hosts have no secret, or different ones.
    PeerLostError
        A rank is gone: it had come and left, or the launcher (gpucoll-run, `gpucoll.launch`) says
        that it has ended, with whatever exit code.
    AbortedError
        A rank was interrupted, or raised something else, while all were meeting.
    BackendUnavailableError
        The backend, or a GPU that is there, cannot serve.
    SharedMemoryError
        There is no memory for the segment.

    Notes
    -----
    Collective: every rank of the job, or of those that meet by one `name`, calls it, as often as
    the others do. The first call of a
    machine compiles the kernels (10 s to a minute; it says so on stderr), later ones load them
    (about a quarter of a second).

    Examples
    --------
    >>> with gpucoll.init() as comm:
    ...     total = comm.all_reduce(x)
    """
    shorten_uncaught()
    check_dependencies()
    if config.local_rank() == 0:  # once for a host: its ranks have the same variables
        config.warn_of_unknown_variables()
    limit, exits, wish = parse(backend, device, mixed, timeout_s, on_async_error, deterministic)
    if is_over_mpi(backend, rank, world_size, meet, name):
        from gpucoll.api.communicator import create
        from gpucoll.api.over_mpi import from_world

        made: Communicator = from_world(limit, exits, wish, create)
    else:
        job = find_job(rank, world_size, meet, name)
        wish = wish._replace(exits=job.is_launched if exits is None else exits)
        with _next_meeting(job, limit) as meeting:
            from gpucoll.backends import precompile

            precompile.load()
            from gpucoll.api.communicator import create

            watch = LauncherWatch(meeting, job.token) if job.is_gpucolls else None
            made = create(meeting, limit, limit, wish, watch)
    if bind:
        made._group.bind_cpus()
    return made


def is_over_mpi(
    backend: str, rank: int | None, world_size: int | None, meet: Any, name: str | None
) -> bool:
    """Return whether the ranks meet over MPI: for its backend, or where nothing else says how."""
    is_given = any(given is not None for given in (rank, world_size, meet, name))
    if backend == MPI:
        if is_given:
            raise ArgumentError(
                "backend='mpi' takes the ranks of MPI.COMM_WORLD: leave rank, world_size, meet and "
                "name out, or give any communicator of mpi4py to Communicator.from_mpi(...)"
            )
        return True
    if is_given or spread_by_mpi() is None:
        return False
    return importlib.util.find_spec("mpi4py") is not None


def _next_meeting(job: Job, timeout_s: float) -> contextlib.AbstractContextManager[Job]:
    """Return the job as its ranks meet now, in the body of this context."""
    if job.meet is not None:  # nothing of this is loaded on one host
        from gpucoll.rendezvous.meeting_store import StorePoint, TorchrunPoint

        if isinstance(job.meet, StorePoint) and not isinstance(job.meet, TorchrunPoint):
            from gpucoll.rendezvous.store_introduction import introduced

            return introduced(job, timeout_s)
    return contextlib.nullcontext(job.next_meeting())
