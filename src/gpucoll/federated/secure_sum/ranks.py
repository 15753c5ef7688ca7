"""`secure_all_reduce`: the sum over ranks, of which no rank sees what another one passes."""

from __future__ import annotations

import hashlib
import os
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gpucoll.api.agreement import agree, check_communicator
from gpucoll.api.communicator import Communicator
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.federated.secure_sum import keys
from gpucoll.federated.secure_sum.masks import add_masks
from gpucoll.federated.secure_sum.rounding import Rounding

_CALL = "secure_all_reduce"
_MOST_LEVELS = 1 << 52  # up to which float64 has all integers and their halves


def secure_all_reduce(
    comm: Communicator,
    x: npt.ArrayLike,
    *,
    clip: float | None = None,
    levels: int | None = None,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    seed: int | None = None,
) -> npt.NDArray[Any]:
    """Return the sum over the ranks; each rank sends its array under masks that cancel in it.

    Collective. Each pair of ranks agrees on a mask by X25519. One adds it, the other subtracts it.
    A rank learns the sum, and what that tells about the others' arrays: with two ranks, all. The
    ranks must follow the program: one that passes messages on could replace keys.

    Parameters
    ----------
    comm : Communicator
        The ranks. If one is lost, this raises as `all_reduce` does; call it again after `shrink`.
    x : array_like
        Floats, or unsigned integers. Same shape and dtype on all ranks, any shape. Unchanged.
    clip : float
        Floats are clipped to -clip..clip. For floats only, which need it.
    levels : int
        Floats become integers in -levels..levels, in steps of clip / levels; 1 to 2**52. For floats
        only, which need it.
    rounding : {"nearest", "stochastic"}
        "stochastic" rounds up or down at random, such that the expected value is exact.
    seed : int, optional
        Seed of this rank's stochastic rounding; give each rank another. Default: random.

    Returns
    -------
    numpy.ndarray
        The sum, of x's shape and dtype, with the same bits on all ranks. Integers are added
        exactly, modulo 2**bits of the dtype. The sum of floats differs from that of the clipped
        arrays by at most P * clip / (2 * levels) with P ranks, with "stochastic" by twice that, and
        by roundings of float64 and of the dtype.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An argument is wrong on a rank: on all ranks, before anything moves. NaN is wrong, too.
    MismatchError
        The ranks passed different settings, shapes or dtypes.
    BackendUnavailableError
        The package cryptography is not installed.

    Cost: two small exchanges, an `all_reduce` of 4 or 8 bytes a value, and P - 1 key exchanges and
    passes of ChaCha20 over x. Memory: the words, and the sum.
    """
    check_communicator(comm)
    problem: Exception | None = None
    given: npt.NDArray[Any] = np.empty(0)
    code, words = None, given
    try:
        given = np.asarray(x)
        code = _rounding(given, comm.world_size, clip, levels, rounding, seed)
        words = given.flatten() if code is None else code.words(given)
    except (TypeError, ValueError) as error:  # arguments' own, and those of NumPy
        problem = error
    settings = {
        "x": f"{given.dtype} of shape {given.shape}",
        "clip": repr(code and code.clip),
        "levels": repr(code and code.levels),
        "rounding": repr(rounding),
    }
    private = os.urandom(keys.KEY_BYTES)
    public = agree(comm, _CALL, problem, settings, keys.public_key(private))
    add_masks(words, _pair_masks(comm.rank, private, public))
    comm.all_reduce(words, out=words)
    total = words if code is None else code.values(words, given.dtype)
    return total.reshape(given.shape)


def _pair_masks(rank: int, private: bytes, public: list[bytes]) -> list[tuple[bytes, bool]]:
    """Return the key of each mask, and whether this rank adds it."""
    salt = hashlib.sha256(b"".join(public)).digest()
    masks = []
    for other, key in enumerate(public):
        if other != rank:
            pair = b"%d %d" % (min(rank, other), max(rank, other))
            mask = keys.derive(keys.shared_secret(private, key), b"ranks " + pair, salt)
            masks.append((mask, rank < other))
    return masks


def _rounding(
    x: npt.NDArray[Any],
    ranks: int,
    clip: float | None,
    levels: int | None,
    rounding: str,
    seed: int | None,
) -> Rounding | None:
    """Return how x is rounded, None for integers; raise if an argument is wrong."""
    if rounding not in ("nearest", "stochastic"):
        raise ArgumentError(
            f'{_CALL}: rounding must be "nearest" or "stochastic"; got {rounding!r}'
        )
    if x.dtype.kind == "u":
        if clip is not None or levels is not None:
            raise ArgumentError(f"{_CALL}: clip and levels are for floats; x is {x.dtype}")
        return None
    if x.dtype.kind != "f" or x.dtype.itemsize > 8:
        raise ArgumentTypeError(
            f"{_CALL}: x must be float16, float32, float64 or unsigned integers; got {x.dtype}"
        )
    if not isinstance(clip, int | float | np.floating) or not 0 < clip < float("inf"):
        raise ArgumentError(f"{_CALL}: clip must be a positive number; got {clip!r}")
    most = min(_MOST_LEVELS, ((1 << 63) - 1) // ranks)
    if (
        isinstance(levels, bool)
        or not isinstance(levels, int | np.integer)
        or not 1 <= levels <= most
    ):
        raise ArgumentError(f"{_CALL}: levels must be an int of 1 to {most}; got {levels!r}")
    if levels / clip == float("inf"):
        raise ArgumentError(f"{_CALL}: clip / levels must not be below 1e-308; clip is {clip}")
    dtype = np.dtype(np.uint32 if ranks * levels < 1 << 31 else np.uint64)
    generator = np.random.default_rng(seed) if rounding == "stochastic" else None
    return Rounding(float(clip), int(levels), dtype, generator)
