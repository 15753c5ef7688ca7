"""Exact samplers of integer noise: the discrete Gaussian, Poisson and Skellam distributions.

A sampler draws by inversion. Let F(k) be the probability of at most k, and U a uniform number with
infinitely many random bits: the smallest k with U < F(k) has exactly that distribution. The sampler
has integers lo and hi with lo <= F(k) * 2^64 <= hi for each k, from interval arithmetic on Python's
integers. The first 64 bits of U decide about k unless they lie between lo and hi of some k. For a
table of a million entries this happens once in 10^13 numbers. The sampler then computes tighter
integers for 128 bits, and goes on with more bits of U until they decide.

So the only approximation is that of the random bits themselves, which come from the operating
system. No floating-point number takes part: samplers that use them lose the guarantee of
differential privacy (Mironov 2012). The running time depends on the drawn numbers (a search in a
table), as it does for all samplers of this kind.
"""

from __future__ import annotations

import bisect
import functools
import math
import secrets
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gpucoll.errors import ArgumentError, ArgumentTypeError, GpucollError

__all__ = ["discrete_gaussian", "skellam"]

Words: TypeAlias = Callable[[int], npt.NDArray[np.uint64]]
"""A source of random 64-bit words: their number -> words."""
Number: TypeAlias = int | float | Fraction
Interval: TypeAlias = tuple[int, int]
"""Two integers, with a number that is known to lie between them."""

MOST_VARIANCE = 2**32
"""The greatest variance: its table takes some seconds and 0.7 GB of memory to make."""
LEAST_VARIANCE = Fraction(1, 2**10)
_GUARD_BITS = 96
"""Bits beyond those that are asked for: of these, rounding uses up 2 log2(entries)."""
_MOST_WORDS = 16
"""Words without a decision that only a broken source of random bits gives: 2^-1000."""
_CHUNK = 1 << 16


def discrete_gaussian(
    variance: Number, count: int, seed: int | None = None
) -> npt.NDArray[np.int64]:
    """Return integers k with probabilities proportional to exp(-k^2 / (2 variance)).

    Parameters
    ----------
    variance : int, float or Fraction
        Sigma squared, exactly this rational number, from 2^-10 to 2^32. The distribution's own
        variance is a little smaller, which counts below sigma = 1 only.
    count : int
    seed : int, optional
        For tests alone: noise that can be repeated protects nobody. Default: random bits of the
        operating system.

    Returns
    -------
    array of int64, shape (count,)

    Notes
    -----
    The first call for a variance makes a table of about 40 sigma entries, 1 microsecond each.
    """
    return drawn("gaussian", variance, count, words_of(seed))


def skellam(variance: Number, count: int, seed: int | None = None) -> npt.NDArray[np.int64]:
    """Return differences of two Poisson numbers of mean variance / 2 each.

    Parameters and result are those of `discrete_gaussian`; here the variance is exact. The sum of
    Skellam numbers is one, whose variance is the sum of theirs.
    """
    return drawn("skellam", variance, count, words_of(seed))


def drawn(kind: str, variance: Number, count: int, words: Words) -> npt.NDArray[np.int64]:
    """Return numbers of a distribution, "gaussian" or "skellam", from a source of random words."""
    if isinstance(variance, bool) or not isinstance(variance, int | float | Fraction):
        raise ArgumentTypeError(f"variance must be an int, float or Fraction; got {variance!r}")
    if not LEAST_VARIANCE <= variance <= MOST_VARIANCE:
        raise ArgumentError(
            f"variance must be from {LEAST_VARIANCE} to {MOST_VARIANCE}; got {variance}"
        )
    if count < 0:
        raise ArgumentError(f"count must be at least 0; got {count}")
    if kind == "gaussian":
        return _table("gaussian", Fraction(variance), 64).draw(count, words)
    table = _table("poisson", Fraction(variance) / 2, 64)
    return table.draw(count, words) - table.draw(count, words)


def words_of(seed: int | None) -> Words:
    """Return a source of random words: the operating system's, or a repeatable one for a seed."""
    if seed is None:
        return lambda count: np.frombuffer(secrets.token_bytes(8 * count), np.uint64)
    return np.random.PCG64(seed).random_raw


class Table:
    """The distribution function of an integer, as bounds that become tighter when needed.

    Parameters
    ----------
    kind : str
        "gaussian" or "poisson".
    parameter : Fraction
        The variance.
    word_bits : int
        Random bits that are used at a time: 64, or fewer in tests, where they rarely suffice.
    """

    def __init__(self, kind: str, parameter: Fraction, word_bits: int) -> None:
        self._bounds = functools.cache(functools.partial(_bounds, kind, parameter))
        self._word_bits = word_bits
        self.first, lower, upper = self._bounds(word_bits)
        self._lower = np.array(lower, np.uint64)
        self._width = np.array([hi - lo for lo, hi in zip(lower, upper, strict=True)], np.uint64)

    def draw(self, count: int, words: Words) -> npt.NDArray[np.int64]:
        """Return random integers."""
        drawn = np.empty(count, np.int64)
        for start in range(0, count, _CHUNK):
            part = drawn[start : start + _CHUNK]
            word = words(part.size) >> np.uint64(64 - self._word_bits)
            place = np.searchsorted(self._lower, word, "right")
            np.add(place, self.first, out=part)
            open_ones = word - self._lower[place - 1] < self._width[place - 1]
            for index in np.flatnonzero(open_ones):
                part[index] = self._decide(int(word[index]), words)
        return drawn

    def _decide(self, uniform: int, words: Words) -> int:
        """Return the integer of a uniform number by drawing more of its bits."""
        for turn in range(2, _MOST_WORDS):
            more = int(words(1)[0]) >> (64 - self._word_bits)
            uniform = uniform << self._word_bits | more
            first, lower, upper = self._bounds(turn * self._word_bits)
            place = bisect.bisect_right(lower, uniform)
            if uniform >= upper[place - 1]:
                return first + place
        raise GpucollError(f"the source of random bits is broken: it gave {uniform:#x}")


_table = functools.lru_cache(maxsize=8)(Table)


def _bounds(kind: str, parameter: Fraction, bits: int) -> tuple[int, list[int], list[int]]:
    """Return k0, and for k = k0, k0 + 1, ... integers around F(k) * 2^bits.

    F(k0) is 0, or so small that it counts for nothing at this precision.
    """
    unit = bits + _GUARD_BITS
    if kind == "gaussian":
        upward, above = _gaussian_side(parameter, unit)
        weights = [*reversed(upward[1:]), *upward]
        first, below = -len(upward), above
    else:
        mode = math.floor(parameter)
        upward, above = _poisson_side(parameter, mode, unit, 1)
        downward, below = _poisson_side(parameter, mode, unit, -1)
        weights = [*reversed(downward[1:]), *upward]
        first = mode - len(downward)
    left = (0, below)
    rest = [(0, above)]  # the sum of what follows each entry, from the end
    for low, high in reversed(weights):
        rest.append((rest[-1][0] + low, rest[-1][1] + high))
    lower, upper = [], []
    for (low, high), right in zip([(0, 0), *weights], reversed(rest), strict=True):
        left = left[0] + low, left[1] + high
        lower.append((left[0] << bits) // (left[0] + right[1]))
        upper.append(-(-(left[1] << bits) // (left[1] + right[0])))
    return first, lower, upper


def _gaussian_side(variance: Fraction, unit: int) -> tuple[list[Interval], int]:
    """Return the weights of 0, 1, 2, ... times 2^unit, and a bound of the sum of the rest.

    The weight of k + 1 is that of k times a ratio, exp(-(2k + 1) / (2 variance)), and the next
    ratio is this one times exp(-1 / variance).
    """
    weight, weights = (1 << unit, 1 << unit), []
    ratio, factor = _exp(1 / (2 * variance), unit), _exp(1 / variance, unit)
    while weight[1] >> (_GUARD_BITS // 4):
        weights.append(weight)
        weight, ratio = _product(weight, ratio, unit), _product(ratio, factor, unit)
    return weights, _rest(weight[1], ratio[1], unit)


def _poisson_side(mean: Fraction, mode: int, unit: int, step: int) -> tuple[list[Interval], int]:
    """Return the weights of the mode and of what follows it in one direction, likewise."""
    weight, weights, k = (1 << unit, 1 << unit), [], mode
    while weight[1] >> (_GUARD_BITS // 4) and k >= 0:
        weights.append(weight)
        ratio = mean / (k + 1) if step > 0 else k / mean
        weight = (
            weight[0] * ratio.numerator // ratio.denominator,
            -(-weight[1] * ratio.numerator // ratio.denominator),
        )
        k += step
    if k < 0:
        return weights, 0
    ratio = mean / (k + 1) if step > 0 else k / mean
    return weights, _rest(weight[1], math.ceil(ratio * 2**unit), unit)


def _rest(weight: int, ratio: int, unit: int) -> int:
    """Return a bound of weight + weight * ratio + ...: the ratios that follow are smaller."""
    return (weight << unit) // ((1 << unit) - ratio) + 1


def _product(x: Interval, y: Interval, unit: int) -> Interval:
    return x[0] * y[0] >> unit, (x[1] * y[1] >> unit) + 1


def _exp(x: Fraction, unit: int) -> Interval:
    """Return integers around exp(-x) * 2^unit, for 0 <= x <= 2^10.

    Decimal's exp is correctly rounded. With 30 digits more than the integer has, the quotient, the
    function and the product are together off by less than 1.
    """
    context = Context(prec=math.ceil(unit * 0.302) + 30)
    quotient = context.divide(Decimal(-x.numerator), Decimal(x.denominator))
    value = int(context.multiply(context.exp(quotient), Decimal(1 << unit)))
    return max(0, value - 1), value + 2
