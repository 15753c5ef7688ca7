"""The names that other benchmarks give to calls measured here, and what differs.

The definitions are those of OSU Micro-Benchmarks 7.4 and of nccl-tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpucoll.bench.patterns import PATTERNS
from gpucoll.bench.rank.inputs import ASYNC

__all__ = ["OTHER_NAMES", "explained"]


@dataclass(frozen=True)
class OtherName:
    """What another benchmark's name means here.

    Attributes
    ----------
    collective : str
        The name of `patterns.MEASURED`.
    benchmark : str
        A key of `BENCHMARKS`.
    differs : str
        What is different in this call alone; ``{ranks}`` is the number of ranks.
    """

    collective: str
    benchmark: str
    differs: str


BENCHMARKS = {
    "OSU": "OSU times each call alone, with a barrier after it, and prints averages over calls and "
    "ranks; here a sample is a loop of calls, and the time is the slowest rank's median.",
    "nccl-tests": "Sizes and bandwidths are nccl-tests'. The time is the slowest rank's, "
    "nccl-tests' the average over ranks; count is that of all ranks' blocks, nccl-tests' that of "
    "one.",
}
"""What differs in every call."""

WHOLE = "SIZE is the same in both"
BLOCKS = (
    "OSU's SIZE is one rank's block, SIZE here is that of all {ranks} ranks' blocks: use {ranks} "
    "times OSU's"
)
PURE = "this is what OSU calls pure communication, and the pattern overlap measures overlap; "
OF_OSU = {
    "allreduce": ("all_reduce", WHOLE),
    "reduce": ("reduce", WHOLE),
    "bcast": ("broadcast", WHOLE),
    "reduce_scatter": ("reduce_scatter", f"{WHOLE}: a rank's whole input"),
    "reduce_scatter_block": ("reduce_scatter", f"{WHOLE}: a rank's whole input"),
    "allgather": ("all_gather", BLOCKS),
    "gather": ("gather", BLOCKS),
    "scatter": ("scatter", BLOCKS),
    "alltoall": ("all_to_all", BLOCKS),
}
OF_NCCL_TESTS = {
    "all_reduce": "all_reduce", "reduce": "reduce", "broadcast": "broadcast",
    "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "alltoall": "all_to_all",
    "gather": "gather", "scatter": "scatter", "sendrecv": "send_recv",
}  # fmt: skip

OTHER_NAMES = {
    **{f"osu_{name}": OtherName(here, "OSU", text) for name, (here, text) in OF_OSU.items()},
    "osu_barrier": OtherName("barrier", "OSU", ""),
    "osu_latency": OtherName("ping_pong", "OSU", f"{WHOLE}, and so is half of the round trip"),
    "osu_bw": OtherName(
        "stream", "OSU",
        f"{WHOLE}, but a reply follows 8 blocking sends (OSU: 64 nonblocking ones), and bandwidths "
        "are in GB/s (OSU: MB/s)",
    ),
    **{
        f"osu_i{name}": OtherName(ASYNC + here, "OSU", PURE + text)
        for name, (here, text) in OF_OSU.items()
        if ASYNC + here in PATTERNS
    },
    **{f"{name}_perf": OtherName(here, "nccl-tests", "") for name, here in OF_NCCL_TESTS.items()},
}  # fmt: skip


def explained(names: Iterable[str], ranks: int) -> Iterator[str]:
    """Yield what each of these names is here, then what differs in each call of its benchmark."""
    found = [OTHER_NAMES[name] for name in names]
    for name, one in zip(names, found, strict=True):
        differs = f"; {one.differs.format(ranks=ranks)}" if one.differs else ""
        yield f"{name} is {one.collective} here{differs}."
    for benchmark in dict.fromkeys(one.benchmark for one in found):
        yield BENCHMARKS[benchmark]
