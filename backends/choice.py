"""Which backend moves which arrays: pure functions of what the ranks know, alike on all of them.

`choose` is asked when a communicator is made, with what each rank can see without loading anything;
`obstacle` when the first GPU call connects the GPUs, with what the ranks have loaded by then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpucoll.wording import list_ranks

VENDOR_BACKENDS = {"cuda": "nccl", "rocm": "rccl"}
"""Kind of GPU, as in a Buffer's ``device`` -> the backend over its vendor's library."""
KINDS = {backend: kind for kind, backend in VENDOR_BACKENDS.items()}
DIRECT = "direct"
"""The backend without a vendor's library, for GPUs of every kind."""
GPU_BACKENDS = (*KINDS, DIRECT)
"""What moves GPU arrays."""
SHARING_VERSION = (2, 30, 0)
"""NCCL from here on can be told to take several ranks on one GPU."""


class Seen(NamedTuple):
    """What a rank sees of its GPUs without loading a library."""

    kind: str
    """``"cuda"``, ``"rocm"``, or empty: none."""
    reason: str
    """How it sees that."""


class Wish(NamedTuple):
    """What a user asks of a communicator."""

    backend: str = "auto"
    """``"auto"``, or a backend's name: the same on all ranks."""
    device: int | None = None
    """This rank's GPU, as its process numbers it: connected at once, not at the first call."""
    exits: bool = False
    """Whether a failure on the GPU that nobody asks for ends the process."""


class Pick(NamedTuple):
    """The backend for one kind of arrays."""

    backend: str
    """Its name; empty: none."""
    reason: str
    """Why; where there is none, with what to do."""
    kinds: tuple[str, ...] = ()
    """Of GPU arrays: the kind of device that it serves on each rank."""


class Choice(NamedTuple):
    """What a communicator's ranks agree on."""

    host: Pick
    gpu: Pick


class Found(NamedTuple):
    """What a rank has found when its GPU is to be connected."""

    problem: str = ""
    """Why it cannot be; then the rest counts for nothing."""
    device: str = ""
    """``"cuda:0"``: as this process numbers it."""
    uuid: str = ""
    """Which GPU it is, on whatever rank."""
    name: str = ""
    """The GPU's product name."""
    version: tuple[int, ...] = ()
    """Of the vendor's library."""
    may_share: bool = False
    """Whether the environment asks the library to take several ranks on one GPU."""
    host: int = 0
    """The number of the rank's host: what a GPU is called may be so on one host alone."""


def choose(wish: str, seen: Sequence[Seen]) -> Choice:
    """Return the backends for host and GPU arrays.

    Parameters
    ----------
    wish : str
        What the user asked for: ``"auto"`` or a backend's name.
    seen : sequence of Seen
        By rank.
    """
    if wish in GPU_BACKENDS:
        refusal = f"backend={wish!r} was asked for, which moves GPU arrays only: use backend='auto'"
        kinds = tuple(KINDS.get(wish, item.kind) for item in seen)
        return Choice(Pick("", refusal), Pick(wish, "asked for", kinds))
    if wish == "cpu":
        refusal = "backend='cpu' was asked for: use backend='auto', or copy to the host"
        return Choice(Pick("cpu", "asked for"), Pick("", refusal))
    return Choice(Pick("cpu", "chosen by auto"), _for_gpus(seen))


def _for_gpus(seen: Sequence[Seen]) -> Pick:
    by_kind: dict[str, list[int]] = defaultdict(list)
    for rank, item in enumerate(seen):
        by_kind[item.kind].append(rank)
    if without := by_kind.pop("", []):
        reason = seen[without[0]].reason
        if len(without) == len(seen):
            return Pick("", f"no GPU: {reason}")
        remedy = "start ranks only where there are GPUs, or copy to the host"
        return Pick("", f"no GPU on {list_ranks(without)}: {reason}; {remedy}")
    if len(by_kind) > 1:
        kinds = ", ".join(
            f"{kind} on {list_ranks(ranks)}" for kind, ranks in sorted(by_kind.items())
        )
        return Pick(
            "",
            f"GPUs of different vendors ({kinds}): no vendor's library moves arrays between "
            "them; copy to the host",
        )
    (kind,) = by_kind
    kinds_by_rank = tuple(item.kind for item in seen)
    if kind not in VENDOR_BACKENDS:  # Host devices
        why = f"{seen[0].reason}; no vendor's library serves Host devices"
        return Pick("direct", f"chosen by auto: {why}", kinds_by_rank)
    return Pick(VENDOR_BACKENDS[kind], f"chosen by auto: {seen[0].reason}", kinds_by_rank)


def obstacle(backend: str, found: Sequence[Found]) -> str:
    """Return why these ranks' GPUs cannot be connected, and what to do; empty where they can.

    Parameters
    ----------
    backend : str
        ``"nccl"`` or ``"rccl"``.
    found : sequence of Found
        By rank.
    """
    name = backend.upper()
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
        + _sharing_hint(backend, found[0].version)
    )


def _sharing_hint(backend: str, version: tuple[int, ...]) -> str:
    if backend != "nccl":
        return ""
    if version >= SHARING_VERSION:
        return ", or try NCCL_MULTI_RANK_GPU_ENABLE=1 (experimental)"
    return f"; NCCL {spelled(SHARING_VERSION)} and later have an experimental way to share one"


def spelled(version: Iterable[int]) -> str:
    """Return a version as people write it."""
    return ".".join(map(str, version))
