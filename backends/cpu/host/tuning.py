"""The CPU backend's tuning: sizes at which the paths through shared memory change, and waiting.

Measured on two cores (`docs/performance.md`); the deciding factor is whether ranks share CPUs.
"""

from __future__ import annotations

from typing import Any, Final

from gpucoll import config
from gpucoll.backends.choice import GPU_BACKENDS
from gpucoll.errors import ArgumentError
from gpucoll.kernels.cpu.addresses import HAS_STRING_COPY
from gpucoll.kernels.cpu.cache_key import processor
from gpucoll.topology import cpu_quota
from gpucoll.transport.shared.layout import ENQUEUED_RECORDS, NEVER, RING, STAGES, Tuning, round_up

KIB = 1024
WISH = "the backend asked for"
MIXED = "mixed"
"""A key in an introduction: the user's setting."""
LANE_BYTES = 256
"""The smallest part of a chunk for one rank."""

ZEN_5: Final = frozenset({"vendor_id=AuthenticAMD", "cpu family=26"})
"""The lines of `processor` on AMD's Zen 5; measured on an EPYC (model 2, 32 MiB of L3)."""
TWO_ON_ZEN_5: Final = {
    "single_copy_min_bytes": 32 << 20,
    "root_copy_min_bytes": 8 << 20,
    "string_copies": 1,
}
"""Different values there for two ranks with a CPU each (`docs/decisions/0036-zen-5-stages.md`)."""
ZEN_4: Final = frozenset({"vendor_id=AuthenticAMD", "cpu family=25"})
"""The lines of `processor` on AMD's Zen 3 and 4; measured on an EPYC (model 17, Zen 4)."""
TWO_ON_ZEN_4: Final = {
    "single_copy_min_bytes": 8 << 20,
    "root_copy_min_bytes": 4 << 20,
    "fetched_min_bytes": NEVER,
    "streamed_bytes": 2 << 20,
    "n_stages": 16,
    "nontemporal_fills": 1,
}
"""Different values there for two ranks with a CPU each (`docs/decisions/0106-fills.md`)."""

MOST: Final = {
    "chunk_bytes": 64 << 20,
    "prefetch_bytes": 1 << 20,
    # Flags start at 0, which must precede it, also for the last slot of the ring.
    "initial_sequence": 2**31 - RING - 1,
    "enqueued_records": 1 << 16,  # 16 MiB for each rank
    "eager_room_bytes": 1 << 30,
    "streamed_bytes": 1 << 30,
    "n_stages": 1024,
    "nontemporal_fills": 2 * int(HAS_STRING_COPY),
    "string_copies": int(HAS_STRING_COPY),
}
"""The largest values; for all others, which are sizes of arrays, `NEVER`."""
LEAST: Final = {"n_stages": STAGES, "streamed_bytes": 256 * KIB}
"""The smallest values; for all others 0."""


def _check_range(name: str, value: int) -> None:
    """Raise unless a value from the environment is usable: the segment's layout depends on it."""
    least, most = LEAST.get(name, 0), MOST.get(name, NEVER)
    if not least <= value <= most:
        raise ArgumentError(f"{config.CPU_TUNING}: {name} must be in {least}..{most}; got {value}")


def is_oversubscribed(introductions: list[dict[str, Any]]) -> bool:
    """Return whether there are more ranks than CPUs that they may use."""
    cpus = {cpu for introduction in introductions for cpu in introduction["cpus"]}
    quota = cpu_quota()
    usable = len(cpus) if quota is None else min(len(cpus), quota)
    return len(introductions) > usable


def _may_use_gpus(introductions: list[dict[str, Any]]) -> bool:
    """Return whether some rank sees a GPU, asks for a GPU backend, or allows mixed arrays."""
    said = [introduction["same"] for introduction in introductions]
    wishes = {same.get(WISH) for same in said}
    return (
        bool(wishes & {*GPU_BACKENDS})
        or any(same.get(MIXED) for same in said)
        or any(introduction.get("gpu", [""])[0] for introduction in introductions)
    )


def _measured_here(world_size: int, crowded: bool) -> dict[str, int]:
    """Return the differences for this processor: none, unless these very ranks were measured."""
    if world_size == 2 and not crowded:
        lines = set(processor().splitlines())
        for family, values in ((ZEN_5, TWO_ON_ZEN_5), (ZEN_4, TWO_ON_ZEN_4)):
            if family <= lines:
                return values
    return {}


def tune(introductions: list[dict[str, Any]]) -> Tuning:
    """Return the table for these ranks; `config.CPU_TUNING` overrides single values."""
    world_size = len(introductions)
    crowded = is_oversubscribed(introductions)
    values = {
        "one_shot_bytes": (16 if crowded else 64 if world_size == 2 else 32) * KIB,
        "chunk_bytes": max(64, 4 * world_size) * KIB if world_size > 2 else 128 * KIB,
        "symmetric_min_bytes": (8 if crowded else 2) * KIB,
        "rooted_bytes": min(64 * KIB, max(16 * KIB, 4096 * KIB // world_size // 64 * 64)),
        "single_copy_min_bytes": 64 * KIB,
        "single_copy_max_bytes": 0 if crowded else 1024 * KIB,
        "gather_copy_max_bytes": NEVER if crowded else 512 * KIB,
        "prefetch_bytes": 1024,
        "initial_sequence": 0,
        "enqueued_records": ENQUEUED_RECORDS if _may_use_gpus(introductions) else 0,
        "eager_room_bytes": 1 << 20,
        "streamed_bytes": 256 * KIB,
        "fetched_min_bytes": 0,
        "nontemporal_fills": 0,
        "root_copy_min_bytes": 0,
        "n_stages": STAGES,
        "string_copies": 0,
    } | _measured_here(world_size, crowded)
    given = config.cpu_tuning()
    if "single_copy_min_bytes" in given:
        values["root_copy_min_bytes"] = 0  # a threshold given explicitly applies everywhere
    for name, value in given.items():
        if name not in values:
            raise ArgumentError(
                f"{config.CPU_TUNING} names {name!r}; there are {', '.join(values)}"
            )
        values[name] = value
        _check_range(name, value)
    values["rooted_bytes"] = max(values["rooted_bytes"], values["one_shot_bytes"])
    least_chunk_bytes = round_up(max(4096, LANE_BYTES * world_size), 4096)
    if values["chunk_bytes"] % 4096 or values["chunk_bytes"] < least_chunk_bytes:
        raise ArgumentError(
            f"{config.CPU_TUNING}: chunk_bytes must be a multiple of 4096, for {world_size} ranks "
            f"{least_chunk_bytes} or more"
        )
    for name in ("one_shot_bytes", "rooted_bytes"):
        if not 64 <= values[name] <= 1 << 20 or values[name] % 64:
            raise ArgumentError(
                f"{config.CPU_TUNING}: {name} must be a multiple of 64 in 64..{1 << 20}"
            )
    records = values["enqueued_records"]
    if records & (records - 1):
        raise ArgumentError(f"{config.CPU_TUNING}: enqueued_records must be a power of two")
    return Tuning(**values)


def waiting(introductions: list[dict[str, Any]]) -> tuple[int, int]:
    """Return how often a wait spins, and yields, before it sleeps.

    A rank with its own CPU spins: its peer answers within microseconds. Ranks that share CPUs yield
    immediately, because the peer that they wait for cannot run otherwise. They do not yield for
    long: the scheduler counts the time of vain yields as the rank's share of the CPU, and gives the
    peer that much less. Compared with 200 yields, 20 yields halve the time of a gather of 1 MiB,
    make 16 MiB of all_reduce a sixth faster and, next to two busy foreign processes, make small
    calls three to five times faster.
    """
    return (20, 20) if is_oversubscribed(introductions) else (5000, 50)
