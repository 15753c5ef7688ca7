"""Find this process's rank and world size, from arguments or from its launcher's environment."""

from __future__ import annotations

import numbers
import os
from typing import TYPE_CHECKING, NamedTuple

from gpucoll import config
from gpucoll.errors import ArgumentError, ArgumentTypeError, RendezvousError
from gpucoll.rendezvous import launchers
from gpucoll.rendezvous.launchers import Started, number
from gpucoll.rendezvous.meeting_numbers import meeting_number
from gpucoll.wording import rank_of

if TYPE_CHECKING:
    from gpucoll.rendezvous.meeting_points import MeetingPoint
    from gpucoll.rendezvous.meeting_store import AnyStore

_GPUCOLL, _TORCHRUN = "gpucoll-run's environment", "torchrun's environment"
_OWN_TOKENS = (_GPUCOLL, _TORCHRUN)
_TORCHRUN_MEETS = ("MASTER_ADDR", "MASTER_PORT")
_ALONE, _ARGUMENTS = "no launcher", "arguments"
_LONGEST_NAME = 200
HAVE_NAMES = "each group of them needs a name of its own: init(name=...)"
"""The remedy if two groups of ranks have met as if they were one."""


class Job(NamedTuple):
    """A rank's number, and the means by which it meets the other ranks."""

    rank: int
    world_size: int
    token: str
    """The same on all ranks of the job on one host, which meet by it there."""
    origin: str
    """Where rank and world size come from, for messages."""
    is_launched: bool = False
    """Whether a launcher started this process, and ends the job if the process fails."""
    meet: MeetingPoint | None = None
    """How ranks on several hosts learn where rank 0 listens; None: all are on this host."""
    name: str = ""
    """The user's name for the ranks that meet; empty: all that the launcher started."""
    title: str = ""
    """Identifies one meeting over TCP: the same on all of its ranks, on all hosts."""
    numbers: tuple[int, ...] = ()
    """The ranks' numbers for errors, if these are one host's part of a larger group; or empty.

    The numbers of the ranks of other hosts follow.
    """
    total: int = 0
    """The number of ranks of that larger group."""
    host: str = ""
    """What errors call the host of this part of it."""
    group: str = ""
    """Tells that group from all others: the same on all of its hosts, and no secret."""

    def number(self, rank: int) -> int:
        """Return the number by which errors name a rank."""
        return self.numbers[rank] if self.numbers else rank

    def who(self, rank: int) -> str:
        """Return "rank 1 of 4"."""
        return rank_of(self.number(rank), self.total or self.world_size)

    @property
    def is_gpucolls(self) -> bool:
        """Whether gpucoll's launcher started the ranks, and the job has all of them."""
        return self.origin == _GPUCOLL

    def next_meeting(self) -> Job:
        """Return the job for its next meeting, and count the meeting.

        Ranks that meet by the same name do so equally often, so their counts agree.
        """
        # A name from a user has no NUL, so no token equals another token with a name.
        series = f"{self.token}\0{self.name}" if self.name else self.token
        count = meeting_number(series)
        meet = None if self.meet is None else self.meet.numbered(count)
        title = f"{self.name}#{count} of {self.world_size}"
        return self._replace(token=f"{series}#{count}", meet=meet, title=title)


def find_job(
    rank: int | None = None,
    world_size: int | None = None,
    meet: str | AnyStore | None = None,
    name: str | None = None,
) -> Job:
    """Return this process's job: from the arguments or the launcher, or else a single rank.

    If one launcher runs inside another one's job, the first of these is used: gpucoll-run,
    torchrun, Open MPI, hydra (MPICH, Intel MPI), Slurm.

    Parameters
    ----------
    rank, world_size : int, optional
        Take precedence over the launcher. If they are fewer ranks than it started, these are ranks
        of this host unless `meet` or `name` is given.
    meet : str or store, optional
        Where the ranks of several hosts meet (`meet_argument.parse_meet`). Default:
        ``GPUCOLL_MEET``, then the launcher's meeting point. It is ignored if the launcher started
        all ranks, and no others are meant, on this host.
    name : str, optional
        Name of the group of ranks that meet, if these are not all that the launcher started, or
        meet separately from a meeting of all.

    Raises
    ------
    ArgumentError
        Only one of rank and world_size is given, or they contradict each other; or the meeting
        point or the name is invalid.
    RendezvousError
        The environment is incomplete, or names neither the job nor a meeting point.
    """
    name = checked_name(name)
    if rank is None and world_size is None:
        started = _find_started()
        if started is None:
            _check_not_half_told()
            launchers.check_no_other()
            if meet is not None:
                raise ArgumentError(
                    "meet is given, but neither the rank of this process nor the number of ranks: "
                    "give rank and world_size too, or start the ranks with a launcher"
                )
            return Job(0, 1, "", _ALONE, name=name)
        if not started.elsewhere:
            meet = None
        rank, world_size, origin = started.rank, started.world_size, started.origin
        if not 0 <= rank < world_size:
            raise RendezvousError(f"{origin} gives rank {rank} of {world_size}, which cannot be")
    else:
        if rank is None or world_size is None:
            raise ArgumentError("rank and world_size go together: give both or none")
        _check_arguments(rank, world_size)
        rank, world_size, origin = int(rank), int(world_size), _ARGUMENTS
        started = _find_started() if world_size > 1 else None
    point = _meeting_point(meet, started, world_size, name) if world_size > 1 else None
    token = _token(started, rank, world_size, point)
    is_launched = _is_launched(origin, world_size)
    return Job(rank, world_size, token, origin, is_launched, meet=point, name=name)


def _is_launched(origin: str, world_size: int) -> bool:
    # A single task is often a shell, which must not end with a program that is called there by
    # hand.
    return origin != _ARGUMENTS and (world_size > 1 or origin in _OWN_TOKENS)


def checked_name(name: object) -> str:
    """Return a name that a user has given to some ranks; empty: none."""
    if name is None:
        return ""
    if not isinstance(name, str):
        raise ArgumentTypeError(f"name must be a str; got {name!r}")
    if not name or len(name) > _LONGEST_NAME or not name.isprintable():
        raise ArgumentError(
            f"name must have 1 to {_LONGEST_NAME} printable characters; got {name[:50]!r}"
        )
    return name


def _check_arguments(rank: int, world_size: int) -> None:
    given: tuple[tuple[str, object], ...] = (("rank", rank), ("world_size", world_size))
    for name, value in given:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise ArgumentTypeError(f"{name} must be an int; got {value!r}")
    if world_size < 1:
        raise ArgumentError(f"world_size must be at least 1; got {world_size}")
    if not 0 <= rank < world_size:
        raise ArgumentError(f"rank must be in 0..{world_size - 1}; got {rank}")


def _find_started() -> Started | None:
    return _from_gpucoll() or _from_torchrun() or launchers.find()


def started_ranks() -> tuple[str, int] | None:
    """Return the source of the information, and how many ranks a launcher started; or None."""
    started = _find_started()
    return None if started is None else (started.origin, started.world_size)


def launchers_job(name: str) -> tuple[str, MeetingPoint | None]:
    """Return a launched job's word, or empty; and where its ranks on several hosts meet, or None.

    A process that joins the job may have been given the word alone (``GPUCOLL_JOB``).
    """
    started = _find_started()
    if started is None:
        return config.variable(config.JOB) or "", None
    point = started.meet(name) if started.elsewhere and started.meet is not None else None
    return started.token or config.variable(config.JOB) or "", point


def spread_by_mpi() -> Started | None:
    """Return how an MPI's launcher, or srun, has started this rank on one of several hosts.

    None if none has, or if everything else that the ranks need to meet is set.
    """
    if config.variable(config.MEET):
        return None
    started = _find_started()
    if started is None or started.origin in _OWN_TOKENS or not started.elsewhere:
        return None
    if started.meet is not None:
        from gpucoll.transport.tcp.secret import job_secret

        return None if job_secret() is not None else started
    return started


def _meeting_point(
    given: str | AnyStore | None, started: Started | None, world_size: int, name: str
) -> MeetingPoint | None:
    """Return where ranks of several hosts meet; None: all ranks are on this host."""
    text = config.variable(config.MEET)
    if given is None:
        if started is None and not text:
            return None
        if started is not None:
            # Fewer ranks, and no name for their group: they are ranks of one host.
            is_of_one_host = world_size != started.world_size and not name
            if not started.elsewhere or is_of_one_host:
                return None
            if not text:
                return _launchers_point(started, name)
    from gpucoll.rendezvous.meet_argument import parse_meet

    return parse_meet(given, name) if given is not None else parse_meet(text, name, config.MEET)


def _launchers_point(started: Started, name: str) -> MeetingPoint:
    if started.meet is not None:
        return started.meet(name)
    raise RendezvousError(
        f"{started.origin}: the job has {started.world_size} ranks, {started.elsewhere}, and "
        f"nothing says where they meet: set {config.MEET} to tcp://HOST:PORT on each rank, HOST "
        "being rank 0's host and PORT a port that is free there (mpiexec of Open MPI: -x "
        f"{config.MEET}=..., of MPICH and Intel MPI: -genv {config.MEET} ...), or call "
        "init(meet=...); or install mpi4py: then they meet over MPI"
    )


def _token(started: Started | None, rank: int, world_size: int, meet: MeetingPoint | None) -> str:
    """Return the token by which the ranks meet: the launcher's name for the job, or the user's."""
    if world_size == 1:
        return ""
    if started is not None and started.origin in _OWN_TOKENS and started.token:
        return started.token
    if token := config.variable(config.JOB) or (started.token if started else ""):
        return token
    if meet is not None:
        return f"meet:{meet.text}"
    word = f"set {config.JOB} to the same word on each rank"
    if started is None:
        raise RendezvousError(
            f"rank {rank} of {world_size} has nothing by which to find the others: start the ranks "
            f"with gpucoll-run, torchrun, mpiexec or srun, or {word}"
        )
    why = f" ({started.why_no_token})" if started.why_no_token else ""
    raise RendezvousError(
        f"rank {rank} of {world_size} has nothing by which to find the others: {started.origin} "
        f"does not name the job{why}. For each job {word}, or start the ranks with gpucoll-run"
    )


def _from_gpucoll() -> Started | None:
    if config.RANK not in os.environ:
        return None
    token = os.environ.get(config.JOB, "")
    world_size = number(config.WORLD_SIZE)
    elsewhere = _elsewhere(config.LOCAL_WORLD_SIZE, world_size)
    if not config.variable(config.MEET):
        elsewhere = ""  # the variables never named another host
        if world_size > 1 and not token:
            raise RendezvousError(
                f"{config.RANK} is set but {config.JOB} is not: set it to the same word on each "
                f"rank of this host; or, for ranks on several hosts, {config.MEET}"
            )
    return Started(_GPUCOLL, number(config.RANK), world_size, token, elsewhere)


def _elsewhere(local_size: str, world_size: int) -> str:
    """Return how many ranks a variable counts on this host; empty: all, as far as is known."""
    if local_size in os.environ:
        local = number(local_size)
        return "" if local == world_size else f"{local} of them on this host"
    return "on an unknown number of hosts" if config.variable(config.MEET) else ""


def _check_not_half_told() -> None:
    """Raise if the environment tells that there are other ranks, but not how to meet them."""
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys() and number("WORLD_SIZE") > 1:
        missing = " and ".join(name for name in _TORCHRUN_MEETS if name not in os.environ)
        raise RendezvousError(
            f"RANK and WORLD_SIZE={os.environ['WORLD_SIZE']} are set but {missing} not: start the "
            "ranks with gpucoll-run or torchrun, or, for one rank alone, call "
            "init(rank=0, world_size=1)"
        )


def _from_torchrun() -> Started | None:
    if not {"RANK", "WORLD_SIZE", *_TORCHRUN_MEETS} <= os.environ.keys():
        return None
    world_size = number("WORLD_SIZE")
    elsewhere = _elsewhere("LOCAL_WORLD_SIZE", world_size)
    parts = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    token = "torchrun:" + ":".join(os.environ.get(part, "") for part in parts)
    return Started(_TORCHRUN, number("RANK"), world_size, token, elsewhere, meet=_torchruns_point)


def _torchruns_point(name: str) -> MeetingPoint:
    """Return the store by which torchrun's agents met, or a port of our own on its host.

    With ``TORCHELASTIC_USE_AGENT_STORE=True`` there is a store, which torch can read. Without a
    store, ``MASTER_PORT`` is left to torch, and our port is another one that is derived from it.
    """
    import importlib.util

    from gpucoll.rendezvous.addresses import derived_port
    from gpucoll.rendezvous.meeting_points import TcpPoint
    from gpucoll.rendezvous.meeting_store import TorchrunPoint

    host, port = os.environ["MASTER_ADDR"], number("MASTER_PORT")
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("true", "1")
    if has_store and importlib.util.find_spec("torch") is not None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return TorchrunPoint(host, port, name, attempt)
    ours = derived_port(f"torchrun:{port}")
    return TcpPoint(host, ours if ours != port else ours - 1)
