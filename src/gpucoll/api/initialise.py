"""`gpucoll.init`: join a job and make its communicator."""

from __future__ import annotations

import contextlib
import importlib.util
import weakref
from typing import TYPE_CHECKING

from gpucoll import config
from gpucoll.api.parameters import parse
from gpucoll.backends.choice import MPI
from gpucoll.dependencies import check_dependencies
from gpucoll.errors import ArgumentError
from gpucoll.rendezvous.ended_ranks import LauncherWatch
from gpucoll.rendezvous.job import Job, find_job, spread_by_mpi
from gpucoll.tracebacks import shorten_uncaught

if TYPE_CHECKING:
    from gpucoll.api.call_types import AnyDevice
    from gpucoll.api.communicator import Communicator
    from gpucoll.rendezvous.meeting_store import AnyStore


def init(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    meet: str | AnyStore | None = None,
    name: str | None = None,
    backend: str = "auto",
    device: AnyDevice = None,
    mixed: bool = False,
    timeout_s: float | None = None,
    on_async_error: str | None = None,
    deterministic: str | None = None,
    direct_schedule: str | None = None,
    bind: bool = False,
) -> Communicator:
    """Join the job that the launcher started this process in, and return its communicator.

    Parameters
    ----------
    rank, world_size : int, optional
        The number of this process, and of all. Default: the values that gpucoll-run,
        `gpucoll.launch`, torchrun, the mpiexec of Open MPI, MPICH or Intel MPI, or srun have set in
        the environment; without a launcher, the process is one rank alone. Arguments take
        precedence over a launcher.
    meet : str or store, optional
        Where ranks on several hosts meet: ``"tcp://HOST:PORT"`` of rank 0's host, ``"file://PATH"``
        on a file system that they share, or a store with ``set`` and ``get``, like torch's.
        Default: ``GPUCOLL_MEET``, otherwise the address that torchrun or Slurm provides. Ranks on
        several hosts need the job's secret: in ``GPUCOLL_SECRET`` or ``GPUCOLL_SECRET_FILE``, or
        from the store's ``secret()``, if it has that method.
    name : str, optional
        Identifies the group when only some of the launched ranks call init, with `rank` and
        `world_size` counted within the group. Each group has its own name, and calls of init are
        counted per name. Default: all ranks of the job.
    backend : str
        The same on all ranks. ``"auto"``: host arrays go through shared memory; GPU arrays go
        through the vendor's library if every rank has its own GPU, otherwise through ``"direct"``.
        `Communicator.describe` says what was chosen and why. ``"cpu"``: host arrays only.
        ``"mpi"``: host arrays, through the MPI of mpi4py, which has started these ranks.
        ``"nccl"``, ``"rccl"``, ``"oneccl"``, ``"direct"``: GPU arrays only, connected at once.
    device : int, str or device, optional
        This rank's GPU: its number, ``"cuda:1"``, or a device of CuPy or PyTorch. The ranks' GPUs
        are then connected at once; an error is raised unless every rank has one. Default: the GPUs
        are those of the arrays in the first collective call on GPU arrays, and are connected then,
        so the same program also runs without GPUs.
    mixed : bool
        Whether host and GPU arrays may meet in one call: NVIDIA, AMD and CPU ranks in one
        communicator. The same on all ranks, with backend ``"auto"`` or ``"direct"``. A rank without
        a GPU passes host arrays; a rank with a GPU passes either kind. Every call on arrays then
        goes through the direct backend, and the GPUs are connected at once. `device` is ignored on
        a rank without a GPU.
    timeout_s : float, optional
        Deadline for all ranks to arrive, and default deadline of every later wait, in seconds.
        Default: ``GPUCOLL_TIMEOUT_S``, or 300.
    on_async_error : {"raise", "exit"}, optional
        How a failure on the GPU that is found in the background is reported. ``"raise"``: the
        program's next call raises it. ``"exit"``: if the program makes no call within 2 s, the
        process also ends, with the reason on stderr. With ``"exit"``, the exit code is also 1 if
        the program ends without having waited for an asynchronous call on host arrays that failed;
        the reason is on stderr in either case. Default: ``"exit"`` under a launcher, whose job then
        ends; otherwise ``"raise"``.
    deterministic : {None, "order"}
        ``"order"``: reductions everywhere combine the ranks in the order 0 to P-1, and round half
        types once, so the bits depend neither on the size of arrays nor on the placement of ranks.
        Within one host this always holds. Between hosts, and with NCCL and RCCL, it costs time:
        every rank's values travel to the rank that adds them (``docs/sharp_bits.md``). The same on
        all ranks.
    direct_schedule : {None, "auto", "shares", "ring"}
        How the direct backend combines arrays that GPUs of one host exchange through each other's
        memory: each rank combines a share of all ranks' elements, or chunks go around a ring
        (``docs/gpu.md``). ``"auto"``: a ring for three and more GPUs that share a bus, otherwise
        shares. The same on all ranks. Default: ``GPUCOLL_DIRECT_SCHEDULE``, or ``"auto"``.
    bind : bool
        Whether to bind each rank to CPUs of its own, as gpucoll-run does: an equal part of those
        that the ranks may use, if there are enough. For launchers that bind nothing (torchrun,
        mpiexec, systemd). Ranks that already have CPUs of their own stay as they are, as do all
        ranks with ``GPUCOLL_BIND=none``. All threads of the process are bound, until it ends;
        `Communicator.describe` shows the CPUs.

    Raises
    ------
    RendezvousDeadlineError
        A rank did not arrive in time.
    RendezvousError
        A rank runs another version of gpucoll or does not belong to the job; or nothing that the
        launcher provides identifies the job: the message then says what to set.
    AuthenticationError
        Ranks on several hosts have no secret, or different ones.
    PeerLostError
        A rank is gone: its process ended during the rendezvous, or its launcher (gpucoll-run,
        `gpucoll.launch`) reports that it has ended, with any exit code.
    AbortedError
        A rank was interrupted during the rendezvous, or raised another exception.
    BackendUnavailableError
        The backend, or a GPU that was found, cannot be used.
    SharedMemoryError
        The host has no memory for the segment.

    Notes
    -----
    In a process that ``gpucoll-run --elastic`` has started in the place of one that failed, this is
    `gpucoll.join`: the communicator's settings are those of its ranks.

    Collective: every rank of the job, or of the group with this `name`, makes the same number of
    calls, which take about a quarter of a second. If the package has no machine code for this
    processor, the first call on a machine compiles it (10 s to a minute; a message on stderr says
    so).

    Examples
    --------
    >>> with gpucoll.init() as comm:
    ...     total = comm.all_reduce(x)
    """
    shorten_uncaught()
    check_dependencies()
    if config.local_rank() == 0:  # once for each host: its ranks have the same variables
        config.warn_of_unknown_variables()
    limit, exits, wish = parse(
        backend, device, mixed, timeout_s, on_async_error, deterministic, direct_schedule
    )
    if rank is None and world_size is None and config.variable(config.JOIN):
        from gpucoll.api.joining import join

        return _noted(
            join(
                meet=meet,
                name=name,
                device=device,
                timeout_s=timeout_s,
                on_async_error=on_async_error,
                bind=bind,
            )
        )
    if is_over_mpi(backend, rank, world_size, meet, name):
        from gpucoll.api.communicator import create
        from gpucoll.api.over_mpi import from_world

        made: Communicator = from_world(limit, exits, wish, create)
    else:
        job = find_job(rank, world_size, meet, name)
        wish = wish._replace(exits=job.is_launched if exits is None else exits)
        with _next_meeting(job, limit) as meeting:
            from gpucoll.backends import precompile

            precompile.load(is_alone=job.world_size == 1)
            from gpucoll.api.communicator import create

            watch = LauncherWatch(meeting, job.token) if job.is_gpucolls else None
            made = create(meeting, limit, limit, wish, watch)
    if bind:
        made._group.bind_cpus()
    return _noted(made)


_made: list[weakref.ref[Communicator]] = []


def _noted(made: Communicator) -> Communicator:
    _made.append(weakref.ref(made))
    return made


def latest() -> Communicator | None:
    """Return the communicator that `init` made last, of those that are open."""
    while _made:
        last = _made[-1]()
        if last is not None and not last.is_closed:
            return last
        _made.pop()
    return None


def is_over_mpi(
    backend: str, rank: int | None, world_size: int | None, meet: object, name: str | None
) -> bool:
    """Return whether the ranks meet over MPI: its backend is given, or only MPI can tell how."""
    is_given = any(given is not None for given in (rank, world_size, meet, name))
    if backend == MPI:
        if is_given:
            raise ArgumentError(
                "backend='mpi' takes the ranks of MPI.COMM_WORLD: omit rank, world_size, meet and "
                "name, or pass any communicator of mpi4py to Communicator.from_mpi(...)"
            )
        return True
    if is_given or spread_by_mpi() is None:
        return False
    return importlib.util.find_spec("mpi4py") is not None


def _next_meeting(job: Job, timeout_s: float) -> contextlib.AbstractContextManager[Job]:
    """Return a context whose value is the job in the form in which its ranks meet now."""
    if job.meet is not None:  # on one host none of this is loaded
        from gpucoll.rendezvous.meeting_store import StorePoint, TorchrunPoint

        if isinstance(job.meet, StorePoint) and not isinstance(job.meet, TorchrunPoint):
            from gpucoll.rendezvous.store_introduction import introduced

            return introduced(job, timeout_s)
    return contextlib.nullcontext(job.next_meeting())
