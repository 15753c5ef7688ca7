"""What the launchers of MPIs and Slurm set in the environment: this process's rank and its job.

========================  ====================  ====================  ===========================
started by                rank, number          all on this host?     what names the job
========================  ====================  ====================  ===========================
Open MPI (mpiexec)        OMPI_COMM_WORLD_RANK  ..._LOCAL_SIZE is     PMIX_NAMESPACE, and the
                          ..._SIZE              the number            address of its PMIx server
MPICH, Intel MPI          PMI_RANK, PMI_SIZE    MPI_LOCALNRANKS is    the hydra_pmi_proxy above
(mpiexec: hydra)                                the number            this process
MPICH (mpiexec.gforker)   PMI_RANK, PMI_SIZE    always                the mpiexec above it
Slurm (srun)              SLURM_PROCID,         SLURM_STEP_NUM_NODES  SLURM_JOB_ID and
                          SLURM_STEP_NUM_TASKS  is 1                  SLURM_STEP_ID
========================  ====================  ====================  ===========================

The last column names the job on one host. On several hosts, Slurm's ranks meet on the first host of
the step's node list, at a port that is derived from the ids of job and step. The MPIs provide no
meeting point; ``GPUCOLL_MEET`` does, and takes precedence over Slurm's.

Seen with Open MPI 4.1.4 and 5.0.11, MPICH 4.0.2 and 5.0.2, Intel MPI 2021.18 and Slurm 22.05.

An MPI may itself run inside a Slurm job, and its ranks then inherit Slurm's variables. So the MPIs
come first. Slurm's variables are valid only for the tasks of a step, which srun starts. A batch
script and the shell of salloc have SLURM_JOB_ID and SLURM_NTASKS (a batch script has SLURM_PROCID=0
too) but no step: a program that runs there is a single rank. A shell that srun started for one task
(``srun --pty bash``, or salloc's interactive step) is a step of one task, whatever SLURM_NTASKS is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from gpucoll import config
from gpucoll.errors import RendezvousError
from gpucoll.topology.processes import process_of

if TYPE_CHECKING:
    from gpucoll.rendezvous.meeting_points import MeetingPoint

__all__ = ["Started", "check_no_other", "find", "number"]

_HYDRA = ("hydra_pmi_proxy",)
_GFORKER = ("mpiexec.gforker",)
_SLURM_PMIX = "slurm."  # how PMIX_NAMESPACE begins if Slurm is the PMIx server


class Started(NamedTuple):
    """A process that a launcher started as one rank of a job."""

    origin: str
    """Where this is known from, for messages."""
    rank: int
    world_size: int
    token: str
    """The same on every rank of the job, and different for every other job; or empty."""
    elsewhere: str = ""
    """If ranks run on other hosts: a phrase with the number of ranks here, or of hosts."""
    why_no_token: str = ""
    meet: Callable[[str], MeetingPoint] | None = None
    """Returns where ranks on several hosts meet, given a name; None: the launcher does not tell."""


def number(name: str) -> int:
    """Return the value of an environment variable that must be a number."""
    text = os.environ.get(name)
    try:
        return int(text or "")
    except ValueError:
        state = "is not set" if text is None else f"is {text!r}"
        raise RendezvousError(f"{name} must be a number, but {state}") from None


def find() -> Started | None:
    """Return how an MPI's launcher or srun has started this process; None: there is none."""
    return _open_mpi() or _hydra() or _slurm() or _gforker()


def check_no_other() -> None:
    """Raise if a launcher has left traces that tell too little.

    Raises
    ------
    RendezvousError
        This process is one of several ranks, and their number is unknown.
    """
    size = config.variable(config.PMI_SIZE)
    if size == "1":
        return
    several = f"{size} ranks" if size else "several ranks"
    unsaid = "" if size else "how many there are, or "
    for name in (config.PMI_RANK, config.PMI_ID, config.PMIX_RANK):
        if name in os.environ:
            raise RendezvousError(
                f"{name}={os.environ[name]} shows that a launcher started this process as one of "
                f"{several}, but not {unsaid}what names their job: start them "
                "with gpucoll-run, with the mpiexec of Open MPI, MPICH or Intel MPI, or with srun; "
                f"or set {config.RANK}, {config.WORLD_SIZE} and {config.JOB} (a word of the job's "
                "own) on each; or, for one rank alone, call init(rank=0, world_size=1)"
            )


def _open_mpi() -> Started | None:
    if config.OPEN_MPI_WORLD_SIZE not in os.environ:
        return None
    world_size = number(config.OPEN_MPI_WORLD_SIZE)
    # Version 4 numbers its jobs with 16 bits of a hash; the server's port tells jobs of one number
    # apart.
    parts = [config.variable(name) for name in (config.PMIX_NAMESPACE, config.PMIX_SERVER)]
    token = f"openmpi:{':'.join(parts)}" if parts[0] else ""
    return Started(
        "Open MPI's environment",
        number(config.OPEN_MPI_RANK),
        world_size,
        token,
        _others(world_size, number(config.OPEN_MPI_LOCAL_SIZE)),
        f"{config.PMIX_NAMESPACE} is not set",
    )


def _hydra() -> Started | None:
    if not {config.HYDRA_LOCAL_SIZE, config.PMI_SIZE} <= os.environ.keys():
        return None
    world_size = number(config.PMI_SIZE)
    elsewhere = _others(world_size, number(config.HYDRA_LOCAL_SIZE))
    return _child_of(_HYDRA, "hydra's environment (mpiexec of MPICH or Intel MPI)", elsewhere)


def _gforker() -> Started | None:
    if config.PMI_SIZE not in os.environ:
        return None
    found = _child_of(_GFORKER, "mpiexec.gforker's environment", "")
    return found if found.token or found.world_size == 1 else None


def _child_of(names: tuple[str, ...], origin: str, elsewhere: str) -> Started:
    """Return what PMI's variables tell of a process below a launcher; none names the job."""
    world_size = number(config.PMI_SIZE)
    token = _ancestor(names) if world_size > 1 else ""
    why = f"no process above this one is called {names[0]}"
    return Started(origin, number(config.PMI_RANK), world_size, token, elsewhere, why)


def _slurm() -> Started | None:
    step = (config.SLURM_STEP_ID, config.SLURM_STEP_TASKS, config.SLURM_RANK)
    if not {*step} <= os.environ.keys():
        return None
    world_size = number(config.SLURM_STEP_TASKS)
    namespace = config.variable(config.PMIX_NAMESPACE)
    is_inner = config.variable(config.PMI_SIZE) not in ("", str(world_size))
    if is_inner or (namespace and not namespace.startswith(_SLURM_PMIX)):
        return None  # the variables are of another launcher, which a task of the step has started
    nodes = number(config.SLURM_STEP_NODES)
    token = f"slurm:{config.variable(config.SLURM_JOB_ID)}.{config.variable(config.SLURM_STEP_ID)}"
    return Started(
        "srun's environment",
        number(config.SLURM_RANK),
        world_size,
        token,
        f"on {nodes} hosts" if nodes != 1 else "",
        meet=lambda name: _first_slurm_host(token),
    )


def _first_slurm_host(token: str) -> MeetingPoint:
    """Return the meeting point on the step's first host, where srun puts rank 0."""
    from gpucoll.rendezvous.addresses import derived_port
    from gpucoll.rendezvous.meeting_points import TcpPoint
    from gpucoll.rendezvous.slurm_nodes import node_names

    for variable in (config.SLURM_STEP_NODE_LIST, config.SLURM_JOB_NODE_LIST):
        if text := config.variable(variable):
            try:
                return TcpPoint(next(node_names(text)), derived_port(token))
            except ValueError as error:
                why = f"{variable} is {text[:200]!r}: {error}"
                break
    else:
        why = f"{config.SLURM_STEP_NODE_LIST} is not set"
    raise RendezvousError(
        f"srun's environment does not say where rank 0 runs ({why}): set {config.MEET} to "
        "tcp://HOST:PORT of rank 0's host, the same on each rank"
    )


def _others(world_size: int, local_size: int) -> str:
    return "" if local_size == world_size else f"{local_size} of them on this host"


def _ancestor(names: tuple[str, ...]) -> str:
    """Return an identifier of the nearest ancestor process with one of these names; empty: none.

    It is not always the parent: the launcher may have started a shell or a wrapper.
    """
    pid = os.getppid()
    try:
        while pid > 0 and (process := process_of(pid)) is not None:
            if process.name in names:
                # Process numbers are unique within a namespace only, and are reused.
                namespace = os.readlink("/proc/self/ns/pid")
                return f"{names[0]}:{namespace}:{pid}:{process.started_ticks}"
            pid = process.parent
    except OSError:
        pass  # /proc does not exist, or is hidden
    return ""
