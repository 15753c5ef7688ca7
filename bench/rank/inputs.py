"""Inputs from which every result follows exactly, and counts of elements that differ from it.

The values repeat with a prime period, so that a misplaced chunk is detected. They are small whole
numbers, so that sums are exact in every dtype and in any order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = [
    "ASYNC",
    "STORAGE",
    "count_wrong",
    "encode",
    "expected",
    "fill",
    "fill_with_one",
    "in_place_pair",
    "is_pattern",
    "lengths",
    "one",
    "plain",
    "poison",
    "storage",
    "values",
]

Array = Any  # numpy's generic array types are of no use here: the dtype is only known at run time

PERIOD = 1013
"""Elements until the pattern repeats: a prime, so no chunk or slice size is a multiple of it."""

STORAGE = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
"""Stand-ins for dtypes that NumPy itself lacks: unsigned integers with the same bits."""

EXACT_TO = {
    "bool": 1, "int8": 127, "uint8": 255, "int16": 32767, "float16": 2048, "bfloat16": 256,
    "float8_e4m3fn": 16, "float8_e5m2": 8,
}  # fmt: skip
"""The limit up to which a dtype represents every whole number; other dtypes go beyond any need."""

FOLDS: dict[str, Any] = {
    "sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
    "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
    "land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor,
}  # fmt: skip

LOGICAL = ("land", "lor", "lxor")


ASYNC = "async_"
"""Prefix of a collective's name: started, then waited for."""

RESULTS_OF = {
    "overlap": "all_reduce", "overlap_sleep": "all_reduce", "isend_irecv": "send_recv",
    "probe_recv": "ping_pong", "recv_unknown": "ping_pong", "producer_consumer": "",
}  # fmt: skip
"""Patterns with a collective's arrays and results, or without any."""


def plain(name: str) -> str:
    """Return the collective whose arrays and results a pattern, or the collective itself, has."""
    return RESULTS_OF.get(name, name.removeprefix(ASYNC).removesuffix("_object"))


def is_pattern(name: str) -> bool:
    """Return whether a name is more than a collective or a message: see `bench.patterns`."""
    return plain(name) != name


def storage(dtype: str) -> np.dtype[Any]:
    """Return the NumPy dtype in which the bench stores arrays of `dtype`."""
    return np.dtype(STORAGE.get(dtype, dtype))


def values(redop: str, dtype: str, rank: int, ranks: int) -> Array:
    """Return one period of a rank's input, in a wide dtype (int64, or complex128 for complex)."""
    i = np.arange(PERIOD, dtype=np.int64)
    exact_to = EXACT_TO.get(dtype, 1 << 20)
    signed = not dtype.startswith("u") and dtype != "bool"
    if redop == "prod":
        # In each element one rank at most has a two, the others have ones, all with signs: results
        # lie within -2 and 2.
        real = np.where((i + rank) % (2 * ranks) == 0, 2, 1)
        real = real * np.where((i // 3 + rank) % 2, -1, 1) if signed else real
        real = real & 1 if dtype == "bool" else real
        turns = np.array([1, 1j, -1, -1j])[(i + rank) % 4]
        return real * turns if dtype.startswith("complex") else real
    if redop == "avg":
        # All ranks have the same value, except that pairs of ranks have one more and one less.
        beside = 0 if rank == ranks - 1 and ranks % 2 else 1 - 2 * (rank % 2)
        real = 1 + i % max(1, min(96, exact_to // ranks - 1)) + beside
    elif redop in LOGICAL:
        real = i // (rank + 1) % 2
    else:
        # Use as many values as add up exactly. With more ranks than the dtype can count, only some
        # ranks contribute.
        different = max(2, min(97, exact_to // ranks + 1))
        real = (i * (rank + 1) + 3 * rank) % different * (rank % -(-ranks // exact_to) == 0)
    return real + 1j * real[::-1] if dtype.startswith("complex") else real


def lengths(collective: str, count: int, ranks: int) -> tuple[int, int]:
    """Return the numbers of elements of a rank's input and output: `count`, or a block of it.

    They are the same on every rank, although one of the two may be unused off the root.
    """
    block = count // ranks
    collective = plain(collective)
    return (
        block if collective in ("all_gather", "gather") else count,
        block if collective in ("reduce_scatter", "scatter") else count,
    )


def in_place_pair(source: Array, destination: Array, block: int) -> tuple[Array, Array]:
    """Return input and output within the larger array, where the smaller one is a `block` of it."""
    if len(source) == len(destination):
        return source, source
    small, large = sorted((source, destination), key=len)
    part = large[block * len(small) : (block + 1) * len(small)]
    return (large, part) if large is source else (part, large)


def expected(
    collective: str, redop: str, dtype: str, root: int, rank: int, ranks: int, size: int
) -> list[Array]:
    """Return the expected contents of a rank's output of `size` elements.

    The result has one period, in a wide dtype, for each of the equal parts of the output. It is
    empty if the rank gets nothing, or nothing defined (rank 0 of an exclusive scan in MPI).
    """
    given = [values("sum" if redop == "none" else redop, dtype, one, ranks) for one in range(ranks)]
    match plain(collective):
        case "all_reduce":
            return [folded(redop, dtype, given)]
        case "reduce":
            return [folded(redop, dtype, given)] if rank == root else []
        case "reduce_scatter":
            return [np.roll(folded(redop, dtype, given), -rank * size)]
        case "scan":
            return [folded(redop, dtype, given[: rank + 1])]
        case "exclusive_scan":
            return [folded(redop, dtype, given[:rank])] if rank else []
        case "broadcast":
            return [given[root]]
        case "scatter":
            return [np.roll(given[root], -rank * size)]
        case "all_gather":
            return given
        case "gather":
            return given if rank == root else []
        case "all_to_all":
            return [np.roll(one, -rank * (size // ranks)) for one in given]
        case "send_recv":
            return [given[rank - 1]]
        case "ping_pong":
            return [given[1 - rank]] if rank < 2 else []
        case "stream":
            return [given[0]] if rank == 1 else []
    raise ValueError(f"the results of {collective} are not known")


def folded(redop: str, dtype: str, given: list[Array]) -> Array:
    """Return one period of the reduction of all ranks' inputs."""
    result = given[0]
    for one in given[1:]:
        result = FOLDS[redop](result, one)
    if redop == "avg":
        ranks = len(given)
        result = result / ranks if dtype.startswith("complex") else result // ranks
    if redop in LOGICAL:
        result = result.astype(bool)
    return result


def encode(wide: Array, dtype: str) -> Array:
    """Convert values that are exact in `dtype` from a wide dtype to the bench's storage."""
    if dtype == "bfloat16":
        return (wide.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype in STORAGE:
        import ml_dtypes

        return wide.astype(np.float32).astype(getattr(ml_dtypes, dtype)).view(np.uint8)
    return wide.astype(dtype)


def one(dtype: str) -> Any:
    """Return the number one in the bench's storage of `dtype`."""
    return encode(np.ones(1), dtype)[0]


def fill(array: Array, period: Array) -> None:
    """Repeat `period` through `array`."""
    whole = array.size // PERIOD * PERIOD
    array[:whole].reshape(-1, PERIOD)[:] = period
    array[whole:] = period[: array.size - whole]


def fill_with_one(array: Array, dtype: str) -> None:
    """Make every element one."""
    array[:] = one(dtype)


def poison(array: Array) -> None:
    """Give every element a value that no result has."""
    array.view(np.uint8)[:] = 0xA5 if array.dtype != np.bool_ else 0


def count_wrong(array: Array, periods: list[Array]) -> int:
    """Return how many elements of `array` are wrong; each of its parts repeats one period."""
    if not periods:
        return 0
    wrong = 0
    for part, period in zip(array.reshape(len(periods), -1), periods, strict=True):
        whole = part.size // PERIOD * PERIOD
        wrong += int(np.count_nonzero(part[:whole].reshape(-1, PERIOD) != period))
        wrong += int(np.count_nonzero(part[whole:] != period[: part.size - whole]))
    return wrong
