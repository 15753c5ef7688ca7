"""Creation of communicators whose ranks are those of an MPI communicator."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gpucoll import config
from gpucoll.backends.choice import MPI, Wish
from gpucoll.backends.mpi import library
from gpucoll.backends.mpi.ranks import MpiRanks
from gpucoll.errors import BackendUnavailableError, RendezvousError
from gpucoll.rendezvous.job import started_ranks
from gpucoll.rendezvous.told import told_job

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from gpucoll.api.communicator import Communicator

Create = Callable[..., Any]
"""The type of `gpucoll.api.communicator.create`, which is in a higher layer."""


def from_communicator(
    communicator: Intracomm, limit: float, exits: bool | None, wish: Wish, create: Create
) -> Communicator:
    """Return the communicator for `gpucoll.Communicator.from_mpi`."""
    mpi = library.import_mpi()
    is_whole = not library.problem_of(mpi) and communicator == mpi.COMM_WORLD
    if is_whole and communicator.Get_size() == 1:  # each rank may be alone in its own world
        _check_launcher(mpi)
    return _made(communicator, mpi, limit, exits, wish, "Communicator.from_mpi", create)


def from_world(limit: float, exits: bool | None, wish: Wish, create: Create) -> Communicator:
    """Return the communicator of all ranks that the launcher has started, for `gpucoll.init`.

    Raises
    ------
    BackendUnavailableError
        mpi4py or an MPI is missing.
    RendezvousError
        The MPI that mpi4py has loaded is not the one that started the ranks.
    """
    mpi = library.import_mpi()
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    _check_launcher(mpi)
    return _made(mpi.COMM_WORLD, mpi, limit, exits, wish, "init", create)


def _check_launcher(mpi: ModuleType) -> None:
    """Raise if the launcher has started another number of ranks than MPI sees."""
    started = started_ranks()
    n_seen = mpi.COMM_WORLD.Get_size() if not mpi.Is_finalized() else 0
    if started is not None and n_seen not in (0, started[1]):
        raise RendezvousError(
            f"{started[0]} says that the job has {started[1]} ranks, but the MPI that mpi4py has "
            f"loaded ({library.name_of(mpi)}) sees {n_seen}: it did not start them. Start them "
            "with the mpiexec of that MPI, or install mpi4py for the MPI that starts them; or "
            f"meet without MPI: set {config.MEET} and a secret, and use backend 'auto' or 'cpu'"
        )


def _made(
    communicator: Intracomm,
    mpi: ModuleType,
    limit: float,
    exits: bool | None,
    wish: Wish,
    call: str,
    create: Create,
) -> Communicator:
    from gpucoll.backends import precompile

    ranks = MpiRanks.of(communicator, mpi, limit, call)
    is_kept = False
    try:
        _check_all(ranks, mpi, limit, wish)
        job = told_job(ranks.rank, ranks.world_size, lambda data: ranks.tell(data, limit), "mpi")
        wish = wish._replace(exits=job.is_launched if exits is None else exits)
        precompile.load()
        may_take = wish.backend == MPI or (wish.backend == "auto" and not wish.mixed)
        made: Communicator = create(
            job.next_meeting(), limit, limit, wish, over_mpi=(lambda: ranks) if may_take else None
        )
        is_kept = made._choice.host.backend == MPI
        return made
    finally:
        if not is_kept:
            ranks.free()


def _check_all(ranks: MpiRanks, mpi: ModuleType, limit: float, wish: Wish) -> None:
    """Raise on every rank if MPI cannot serve some rank as the user asked."""
    problem = library.problem_for_calls(mpi) if wish.backend in (MPI, "auto") else ""
    problems = [text.decode() for text in ranks.tell(problem.encode(), limit)]
    found = {text: rank for rank, text in reversed([*enumerate(problems)]) if text}
    if wish.backend == MPI and found:
        text = "; ".join(
            f"rank {rank} of {ranks.world_size}: {text}" for text, rank in found.items()
        )
        raise BackendUnavailableError(f"backend 'mpi' is not available: {text}")
