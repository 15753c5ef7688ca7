"""Choose the backend for each kind of array: pure functions with the same result on all ranks.

`choose` runs when a communicator is made, on what each rank sees without loading a library.
`obstacle` runs when the first GPU call connects the GPUs, on what the ranks have loaded by then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from gpucoll.backends import BACKENDS
from gpucoll.errors import BackendUnavailableError
from gpucoll.wording import list_ranks

VENDOR_BACKENDS = {"cuda": "nccl", "rocm": "rccl", "sycl": "oneccl"}
"""Kind of GPU, as in a Buffer's ``device`` -> the backend over its vendor's library."""
KINDS = {backend: kind for kind, backend in VENDOR_BACKENDS.items()}
LIBRARY_NAMES = {"nccl": "NCCL", "rccl": "RCCL", "oneccl": "oneCCL"}
"""Backend -> the name of its vendor's library."""
DIRECT = "direct"
"""The backend that uses no vendor's library."""
NOT_DIRECT = ("sycl",)
"""Kinds of GPUs that the direct backend does not serve."""
WHY_NOT_DIRECT = (
    "the direct backend does not serve Intel GPUs: it needs Level Zero's shared memory handles, "
    "which gpucoll does not use yet. Use backend='oneccl', or copy to the host"
)
GPU_BACKENDS = (*KINDS, DIRECT)
"""The backends that can move GPU arrays, if this version has them."""
MPI = "mpi"
"""The backend that moves arrays through MPI, for ranks that MPI has brought together."""
HOST_DEVICE = "host"
"""The kind of Host devices, which emulate GPUs in host memory."""
HOST_ARRAYS = "cpu"
"""The device of arrays in host memory; with ``mixed=True`` the kind of a rank without a GPU."""
SHARING_VERSION = (2, 30, 0)
"""The first NCCL version that can be told to take several ranks on one GPU."""


class Seen(NamedTuple):
    """The GPU that a rank sees without loading a library."""

    kind: str
    """``"cuda"``, ``"rocm"``, ``"sycl"``, ``"host"`` (Host devices, for tests); empty: none."""
    reason: str
    """How the rank found out."""


class Wish(NamedTuple):
    """The user's settings for a communicator's backends."""

    backend: str = "auto"
    """``"auto"``, or a backend's name: the same on all ranks."""
    device: int | None = None
    """This rank's GPU, by its number in this process: connected at once, not at the first call."""
    exits: bool = False
    """Whether a failure on the GPU that goes unnoticed ends the process."""
    keeps_order: bool = False
    """Whether reductions are to combine the ranks in order: the same on all ranks."""
    mixed: bool = False
    """Whether host and GPU arrays may meet in one call: the same on all ranks."""
    schedule: str = "auto"
    """How the direct backend combines arrays through shared GPU memory: the same on all ranks."""


class Pick(NamedTuple):
    """The backend for one kind of arrays."""

    backend: str
    """The backend's name; empty if there is none."""
    reason: str
    """Why it was chosen; if there is none, why not and what to do."""
    kinds: tuple[str, ...] = ()
    """For GPU arrays: the kind of device that the backend serves on each rank."""


class Choice(NamedTuple):
    """What a communicator's ranks agree on."""

    host: Pick
    gpu: Pick


class Found(NamedTuple):
    """The GPU and the library that a rank found when its GPU is to be connected."""

    problem: str = ""
    """Why the library cannot be used; empty if it can. Otherwise only `device` counts."""
    device: str = ""
    """``"cuda:0"``, by its number in this process; empty if the rank has no GPU."""
    uuid: str = ""
    """Identifies the GPU on all ranks."""
    name: str = ""
    """The GPU's product name."""
    version: tuple[int, ...] = ()
    """The version of the vendor's library."""
    may_share: bool = False
    """Whether the environment asks the library to take several ranks on one GPU."""
    host: int = 0
    """The number of the rank's host: a GPU's identifier may be unique on one host only."""


class ObstacleError(BackendUnavailableError):
    """A vendor's library cannot serve these ranks; all of them know it before they join.

    Attributes
    ----------
    has_gpus : bool
        Whether each rank has a usable GPU, so that another backend can serve them.
    """

    def __init__(self, text: str, has_gpus: bool) -> None:
        super().__init__(text)
        self.has_gpus = has_gpus


def choose(
    wish: str,
    seen: Sequence[Seen],
    served: Collection[str] = BACKENDS,
    *,
    mixed: bool = False,
    takes_mpi: bool = False,
) -> Choice:
    """Return the backends for host and GPU arrays.

    Parameters
    ----------
    wish : str
        What the user asked for: ``"auto"`` or a backend's name.
    seen : sequence of Seen
        By rank.
    served : collection of str
        The backends that there are.
    mixed : bool
        Whether host and GPU arrays may meet in one call; then `wish` is ``"auto"`` or ``"direct"``.
    takes_mpi : bool
        Whether auto takes MPI for host arrays: ranks that it brought together, on several hosts.
    """
    if mixed:
        return _for_both(seen)
    if wish == "cpu":
        refusal = "backend='cpu' was asked for: use backend='auto', or copy to the host"
        return Choice(Pick("cpu", "asked for"), Pick("", refusal))
    if wish == "auto":
        host = Pick("cpu", "chosen by auto")
        if takes_mpi:
            host = Pick(MPI, "chosen by auto: made from MPI, on several hosts")
        return Choice(host, _for_gpus(seen, served))
    if wish == MPI:
        return Choice(Pick(MPI, "asked for"), _staged_for_mpi(seen))
    host = Pick(
        "", f"backend={wish!r} was asked for, which moves GPU arrays only: use backend='auto'"
    )
    if wish in KINDS:
        return Choice(host, Pick(wish, "asked for", _kinds_of_library(wish, seen)))
    if refusal := _without_gpu(seen) or _without_direct(seen):
        return Choice(host, Pick("", refusal))
    return Choice(host, Pick(wish, "asked for", tuple(item.kind for item in seen)))


def _kinds_of_library(backend: str, seen: Sequence[Seen]) -> tuple[str, ...]:
    """Return the kind of device that a vendor's library serves on each rank.

    oneCCL serves host memory, too: with it, Host devices stand in for GPUs.
    """
    takes_host = backend == VENDOR_BACKENDS["sycl"]
    kind = KINDS[backend]
    return tuple(HOST_DEVICE if takes_host and item.kind == HOST_DEVICE else kind for item in seen)


def _without_direct(seen: Sequence[Seen]) -> str:
    """Return which ranks the direct backend does not serve, and why; empty if it serves all."""
    without = [rank for rank, item in enumerate(seen) if item.kind in NOT_DIRECT]
    return f"{list_ranks(without)}: {WHY_NOT_DIRECT}" if without else ""


def _staged_for_mpi(seen: Sequence[Seen]) -> Pick:
    """Return the pick for GPU arrays if the user chose MPI: direct, which sends through MPI."""
    if refusal := _without_gpu(seen) or _without_direct(seen):
        return Pick("", refusal)
    kinds = tuple(item.kind for item in seen)
    reason = "backend='mpi' was asked for: direct, whose ranks move arrays through MPI"
    return Pick(DIRECT, reason, kinds)


def _for_both(seen: Sequence[Seen]) -> Choice:
    """Return the choice for communicators whose calls may mix host and GPU arrays."""
    kinds = tuple(
        HOST_ARRAYS if not item.kind or item.kind in NOT_DIRECT else item.kind for item in seen
    )
    pick = Pick(DIRECT, f"mixed=True: {spelled_kinds(kinds)}", kinds)
    return Choice(Pick(DIRECT, "mixed=True: other ranks may pass GPU arrays", kinds), pick)


def spelled_kinds(kinds: Sequence[str]) -> str:
    """Return a text that lists the kind of GPU on each rank."""
    by_kind: dict[str, list[int]] = defaultdict(list)
    for rank, kind in enumerate(kinds):
        by_kind[kind].append(rank)
    spelled = (
        f"{'host arrays alone' if kind == HOST_ARRAYS else kind} on {list_ranks(ranks)}"
        for kind, ranks in sorted(by_kind.items())
    )
    return ", ".join(spelled)


def _without_gpu(seen: Sequence[Seen]) -> str:
    """Return which ranks have no GPU, and what to do; empty if all have one."""
    without = [rank for rank, item in enumerate(seen) if not item.kind]
    if not without:
        return ""
    reason = seen[without[0]].reason
    if len(without) == len(seen):
        return f"no GPU: {reason}"
    remedy = "start ranks only where there are GPUs, or copy to the host"
    return f"no GPU on {list_ranks(without)}: {reason}; {remedy}"


def _for_gpus(seen: Sequence[Seen], served: Collection[str]) -> Pick:
    """Return the pick of auto: the vendor's library, otherwise direct if it is in `served`."""
    if refusal := _without_gpu(seen):
        return Pick("", refusal)
    by_kind: dict[str, list[int]] = defaultdict(list)
    for rank, item in enumerate(seen):
        by_kind[item.kind].append(rank)
    kinds = tuple(item.kind for item in seen)
    if len(by_kind) == 1 and kinds[0] in VENDOR_BACKENDS:
        return Pick(VENDOR_BACKENDS[kinds[0]], f"chosen by auto: {seen[0].reason}", kinds)
    if len(by_kind) == 1:
        why, remedy = f"{seen[0].reason}; no vendor's library serves Host devices", ""
    else:
        listed = ", ".join(
            f"{kind} on {list_ranks(ranks)}" for kind, ranks in sorted(by_kind.items())
        )
        why = f"GPUs of different vendors ({listed}): no vendor's library moves arrays between them"
        remedy = "; copy to the host"
    if DIRECT in served and not _without_direct(seen):
        return Pick(DIRECT, f"chosen by auto: {why}", kinds)
    return Pick("", f"{why}{remedy}")


def instead(
    wish: str, error: ObstacleError, pick: Pick, served: Collection[str] = BACKENDS
) -> Pick | None:
    """Return the pick that replaces a vendor's library that cannot serve; None: raise the error.

    Only "auto" replaces it; a library that the user named is never replaced. Failures after the
    ranks have begun to join are not handled here: they need to be fixed, not worked around.

    Parameters
    ----------
    wish : str
        What the user asked for.
    error : ObstacleError
        Why the library cannot serve, the same on every rank.
    pick : Pick
        The pick of the library.
    """
    if wish != "auto" or not error.has_gpus or DIRECT not in served:
        return None
    if any(kind in NOT_DIRECT for kind in pick.kinds):
        return None
    return pick._replace(backend=DIRECT, reason=f"chosen by auto when the GPUs connected: {error}")


def obstacle(backend: str, found: Sequence[Found], served: Collection[str] = BACKENDS) -> str:
    """Return why these ranks' GPUs cannot be connected, and what to do; empty if they can be.

    Parameters
    ----------
    backend : str
        A vendor's: ``"nccl"``, ``"rccl"`` or ``"oneccl"``.
    found : sequence of Found
        By rank.
    served : collection of str
        The backends that there are.
    """
    name = LIBRARY_NAMES[backend]
    by_problem: dict[str, list[int]] = defaultdict(list)
    for rank, item in enumerate(found):
        by_problem[item.problem].append(rank)
    by_problem.pop("", None)
    if by_problem:
        return "; ".join(f"{list_ranks(ranks)}: {problem}" for problem, ranks in by_problem.items())
    by_version: dict[tuple[int, ...], list[int]] = defaultdict(list)
    by_gpu: dict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, item in enumerate(found):
        by_version[item.version].append(rank)
        by_gpu[item.host, item.uuid].append(rank)
    if len(by_version) > 1:
        versions = ", ".join(
            f"{spelled(version)} on {list_ranks(ranks)}" for version, ranks in by_version.items()
        )
        return f"the ranks have different versions of {name} ({versions}): install one everywhere"
    shared = {uuid: ranks for (_, uuid), ranks in by_gpu.items() if len(ranks) > 1}
    if not shared or all(item.may_share for item in found):
        return ""
    uuid, ranks = next(iter(shared.items()))
    return (
        f"{list_ranks(ranks)} share one GPU ({found[ranks[0]].name}, {uuid}), which {name} "
        f"{spelled(found[0].version)} refuses: start one rank per GPU"
        + ("" if KINDS[backend] in NOT_DIRECT else _direct_hint(served))
        + _sharing_hint(backend, found[0].version)
    )


def _direct_hint(served: Collection[str]) -> str:
    return ", or leave it to backend='auto', which takes direct there" if DIRECT in served else ""


def _sharing_hint(backend: str, version: tuple[int, ...]) -> str:
    if backend != "nccl":
        return ""
    if version >= SHARING_VERSION:
        return ", or try NCCL_MULTI_RANK_GPU_ENABLE=1 (experimental)"
    return f"; NCCL {spelled(SHARING_VERSION)} and later have an experimental way to share one"


def spelled(version: Iterable[int]) -> str:
    """Return a version as dotted text."""
    return ".".join(map(str, version))
