"""Differential privacy of sums: clipping, rounding, each client's share of the noise, epsilon.

A record (or a client) adds one vector to the sum. Neighbouring data sets differ by one record that
is there or is not. `DistributedNoise` bounds the L2 norm of each vector, after it was rounded to
integers. Each client adds integer noise of its own, so that no one needs to be trusted with the sum
without noise. The package dp-accounting computes epsilon; gpucoll only describes the mechanism to
it. Gradients of single examples are the training library's: for PyTorch opacus has them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.errors import ArgumentError, ArgumentTypeError, BackendUnavailableError
from gpucoll.federated.samplers import LEAST_VARIANCE, MOST_VARIANCE, drawn, words_of

__all__ = ["DistributedNoise", "epsilon_of_gaussian"]

_KINDS = ("gaussian", "skellam")
_BETA = math.exp(-0.5)
"""The greatest probability that a rounded vector is too long and is rounded again: beta."""
_MOST_ATTEMPTS = 100
_SKELLAM_ORDERS = (*range(2, 129), 192, 256, 384, 512, 1024, 2048)
"""The bound of Skellam's Rényi divergence holds for integers alone."""
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class DistributedNoise:
    """A sum of clipped vectors with integer noise, of which each client adds a share.

    Parameters
    ----------
    kind : str
        "gaussian": discrete Gaussian noise (Kairouz, Liu and Steinke 2021). "skellam": differences
        of Poisson numbers, whose sums have the same distribution (Agarwal, Kairouz and Liu 2021).
    clip : float
        The greatest L2 norm of a vector; longer ones are shortened to it.
    noise_multiplier : float
        Standard deviation of the noise in the sum, divided by `clip`, if `clients` add theirs.
    clients : int
        The least number of clients whose noise is in the sum: `SecureSum`'s threshold, less those
        that may tell others their noise. With more clients there is more noise, and epsilon is an
        upper bound.
    size : int
        Number of elements of a vector.
    levels : int
        A vector's element of size `clip` becomes this integer. More levels round less, and take
        more bits.

    Attributes
    ----------
    variance : Fraction
        The parameter of one client's noise, in integers: (noise_multiplier levels)^2 / clients,
        exactly.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        A number is out of its range; or one client's noise has a variance above 2^32, or below 1/4
        ("gaussian", for which the papers' bounds begin there) or 1/1024 ("skellam").

    Notes
    -----
    **Sensitivity.** A vector of norm at most c = levels is rounded to integers, each element up or
    down at random, with the vector as mean. It is rounded again until its squared norm is at most::

        l2_squared = min((c + sqrt(d))^2, c^2 + d / 4 + c + sqrt(d) / 2)

    with d elements (theorem 1 of the first paper, with beta = exp(-1/2)). This is checked on
    integers, so that the bound is no matter of floating-point rounding. The L1 norm is at most
    min(sqrt(d), l2) l2.

    **Noise.** See `gpucoll.federated.samplers`: exact, from the operating system's random bits.

    **Epsilon.** dp-accounting makes it of the Rényi divergence of order a. With n clients of
    variance s^2 and t = 10 sum over k < n of exp(-2 pi^2 s^2 k / (k + 1)), the smallest of
    a l2^2 / (2 n s^2) + t d,  a (l2^2 / (n s^2) + 2 t l1 / (sqrt(n) s) + t^2 d) / 2  and
    a (l2 / (sqrt(n) s) + t sqrt(d))^2 / 2 for "gaussian"; and with m = n s^2
    a l2^2 / (2 m) + min(((2 a - 1) l2^2 + 6 l1) / (4 m^2), 3 l1 / (2 m)) for "skellam".

    Examples
    --------
    >>> noise = DistributedNoise("gaussian", 1.0, 10.0, clients=6, size=650, levels=1000)
    >>> words = noise.encode(gradients_of_examples)  # on each client, shape (examples, 650)
    >>> total = noise.decode(secure_sum_of_words)  # the sum over all examples, with noise
    >>> noise.epsilon(delta=1e-5, steps=40)
    """

    kind: str
    clip: float
    noise_multiplier: float
    clients: int
    size: int
    levels: int

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ArgumentError(f"kind must be one of {', '.join(_KINDS)}; got {self.kind!r}")
        for name in ("clip", "noise_multiplier"):
            _check(name, getattr(self, name), int | float, 0, math.inf)
        for name, most in (("clients", 2**20), ("size", 2**40), ("levels", 2**30)):
            _check(name, getattr(self, name), int, 0, most)
        least = Fraction(1, 4) if self.kind == "gaussian" else LEAST_VARIANCE
        if not least <= self.variance <= MOST_VARIANCE:
            raise ArgumentError(
                f"a client's noise has the variance (noise_multiplier levels)^2 / clients = "
                f"{float(self.variance):.4g}, which must be from {least} to "
                f"{MOST_VARIANCE}: choose other levels (now {self.levels})"
            )

    @property
    def variance(self) -> Fraction:
        """The parameter of one client's noise, in integers."""
        return (Fraction(self.noise_multiplier) * self.levels) ** 2 / self.clients

    @property
    def l2_squared(self) -> int:
        """The greatest squared L2 norm of a rounded vector, in integers."""
        c, root = self.levels, math.sqrt(self.size)
        often = c**2 + self.size / 4 + math.sqrt(-2 * math.log(_BETA)) * (c + root / 2)
        return math.floor(min((c + root) ** 2, often))

    @property
    def l1(self) -> float:
        """The greatest L1 norm of a rounded vector, in integers."""
        return min(math.sqrt(self.size * self.l2_squared), float(self.l2_squared))

    def encode(
        self, x: npt.ArrayLike, bits: int = 32, seed: int | None = None
    ) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Return the sum of a client's clipped and rounded vectors, plus its share of the noise.

        Parameters
        ----------
        x : array_like
            Floats, shape (records, size), or (size,) for one vector; there may be no record.
        bits : int
            The integers are modulo 2**bits, for a `SecureSum` of so many bits; see `bits_for`.
        seed : int, optional
            For tests alone. Default: random bits of the operating system.

        Returns
        -------
        array of unsigned integers, shape (size,)
            Of the smallest dtype that has so many bits: 8, 16, 32 or 64.

        Raises
        ------
        ArgumentError
            x has another shape, or NaN or infinite elements.
        """
        _check("bits", bits, int, 7, 64)
        rows = np.atleast_2d(np.asarray(x))
        if rows.shape[1:] != (self.size,) or rows.ndim != 2:
            raise ArgumentError(
                f"x must have the shape (records, {self.size}) or ({self.size},); got {np.shape(x)}"
            )
        words = words_of(seed)
        total = drawn(self.kind, self.variance, self.size, words)
        at_once = max(1, _CHUNK_BYTES // (8 * self.size))
        for first in range(0, len(rows), at_once):
            part = rows[first : first + at_once].astype(np.float64)
            if not np.isfinite(part).all():
                raise ArgumentError("x has NaN or infinite elements")
            total += self._rounded(self._clipped(part), words).sum(axis=0)
        dtype = np.dtype(f"u{max(8, 1 << (bits - 1).bit_length()) // 8}")
        return (total.view(np.uint64) & np.uint64((1 << bits) - 1)).astype(dtype)

    def decode(
        self, total: npt.NDArray[np.unsignedinteger[Any]], bits: int = 32
    ) -> npt.NDArray[np.float64]:
        """Return the sum of all clients' vectors, with noise, from the sum modulo 2**bits."""
        shift = np.uint64(64 - bits)
        signed = (np.asarray(total).astype(np.uint64) << shift).view(np.int64) >> shift.astype(int)
        return np.asarray(signed * (self.clip / self.levels))

    def bits_for(self, records: int, clients: int) -> int:
        """Return a number of bits that the sum exceeds with a probability of at most 2^-64.

        Parameters
        ----------
        records : int
            The greatest number of vectors in the sum.
        clients : int
            The greatest number of clients that add noise.
        """
        # Bernstein's inequality, for both distributions: P(noise > t) <= exp(-t^2/(2 (v + t/3))).
        chance = 64 * math.log(2) + math.log(2 * self.size)
        noise = chance / 3 + math.sqrt(chance**2 / 9 + 2 * clients * float(self.variance) * chance)
        most = records * math.isqrt(self.l2_squared) + math.ceil(noise)
        return max(8, most.bit_length() + 1)

    def epsilon(self, delta: float, steps: int = 1) -> float:
        """Return epsilon of (epsilon, delta)-differential privacy of some sums, by dp-accounting.

        Parameters
        ----------
        delta : float
            Between 0 and 1, such as 1e-5: well below 1 / number of records.
        steps : int
            Number of sums over the same records. Each takes all of them: drawing some of them for a
            sum would lower epsilon, which is not counted here.

        Raises
        ------
        BackendUnavailableError
            The package dp-accounting is not installed.
        """
        accounting = _accounting()
        orders = None if self.kind == "gaussian" else _SKELLAM_ORDERS
        found = []
        for rho, xi in self._lines():
            accountant = accounting.rdp.RdpAccountant(orders)
            accountant.compose(accounting.ZCDpEvent(rho, xi), _steps(steps))
            found.append(float(accountant.get_epsilon(_delta(delta))))
        return min(found)

    def _lines(self) -> list[tuple[float, float]]:
        """Return rho and xi of each bound of the Rényi divergence: rho * order + xi."""
        l2_squared, l1, size = self.l2_squared, self.l1, self.size
        total = self.clients * float(self.variance)
        if self.kind == "skellam":
            shared = l2_squared / (2 * total)
            quadratic = shared + l2_squared / (2 * total**2)
            rest = max(0.0, (6 * l1 - l2_squared) / (4 * total**2))
            return [(quadratic, rest), (shared, 3 * l1 / (2 * total))]
        tau = inflation(float(self.variance), self.clients)
        far = math.sqrt(l2_squared / total)
        return [
            (far**2 / 2, tau * size),
            (far**2 / 2 + tau * l1 / math.sqrt(total) + tau**2 * size / 2, 0.0),
            ((far + tau * math.sqrt(size)) ** 2 / 2, 0.0),
        ]

    def _clipped(self, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return rows with a norm of at most `levels`, up to rounding."""
        scale = np.abs(rows).max(axis=1, initial=0.0, keepdims=True)  # squares do not overflow
        scale[scale == 0] = 1
        norms = np.linalg.norm(rows / scale, axis=1, keepdims=True) * (scale / self.clip)
        return np.asarray(rows / np.maximum(norms, 1) * (self.levels / self.clip))

    def _rounded(self, rows: npt.NDArray[np.float64], words: Any) -> npt.NDArray[np.int64]:
        """Return rows of integers whose norms are bounded, with `rows` as mean."""
        made, left = np.trunc(rows).astype(np.int64), np.arange(len(rows))
        floor = np.floor(rows)
        for _ in range(_MOST_ATTEMPTS):  # then it stays truncated: once in 10^21 at most
            chances = (words(left.size * self.size) >> np.uint64(11)) * 2.0**-53
            above = chances.reshape(-1, self.size) < rows[left] - floor[left]
            tried = floor[left].astype(np.int64) + above
            is_short = np.einsum("ij,ij->i", tried, tried) <= self.l2_squared
            made[left[is_short]] = tried[is_short]
            left = left[~is_short]
            if not left.size:
                break
        return made


def inflation(variance: float, clients: int) -> float:
    """Return by how much a sum of discrete Gaussians differs from one: the paper's tau."""
    exponents = (-2 * math.pi**2 * variance * k / (k + 1) for k in range(1, clients))
    return 10 * math.fsum(map(math.exp, exponents))


def epsilon_of_gaussian(
    noise_multiplier: float,
    delta: float,
    steps: int = 1,
    sampling: float = 1.0,
    accountant: str = "pld",
) -> float:
    """Return epsilon of sums with continuous Gaussian noise that a trusted server adds.

    It is what training with DP-SGD at one place would have, to compare with.

    Parameters
    ----------
    noise_multiplier : float
        Standard deviation of the noise divided by the greatest norm of a vector.
    delta : float
    steps : int
    sampling : float
        The probability with which each record is in a sum, independently (Poisson sampling).
    accountant : str
        "pld" (privacy loss distributions: tight) or "rdp" (Rényi divergences).

    Raises
    ------
    ArgumentError, ArgumentTypeError
    BackendUnavailableError
        The package dp-accounting is not installed.
    """
    _check("noise_multiplier", noise_multiplier, int | float, 0, math.inf)
    _check("sampling", sampling, int | float, 0, 1)
    if accountant not in ("pld", "rdp"):
        raise ArgumentError(f"accountant must be pld or rdp; got {accountant!r}")
    accounting = _accounting()
    event = accounting.GaussianDpEvent(noise_multiplier)
    if sampling < 1:
        event = accounting.PoissonSampledDpEvent(sampling, event)
    counted = (
        accounting.pld.PLDAccountant() if accountant == "pld" else accounting.rdp.RdpAccountant()
    )
    counted.compose(event, _steps(steps))
    return float(counted.get_epsilon(_delta(delta)))


def _accounting() -> Any:
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError as error:
        raise BackendUnavailableError(
            "accounting needs the package dp-accounting: pip install 'gpucoll[federated]'"
        ) from error
    return dp_accounting


def _steps(steps: int) -> int:
    _check("steps", steps, int, 0, 2**40)
    return steps


def _delta(delta: float) -> float:
    _check("delta", delta, float, 0, 1)
    if delta == 1:
        raise ArgumentError("delta must be below 1")
    return delta


def _check(name: str, value: Any, kind: Any, above: float, most: float) -> None:
    """Raise unless a number of this type is greater than one bound, and at most the other."""
    if isinstance(value, bool) or not isinstance(value, kind):
        article = "an int" if kind is int else "a number"
        raise ArgumentTypeError(f"{name} must be {article}; got {value!r}")
    if not (above < value <= most and math.isfinite(value)):
        raise ArgumentError(f"{name} must be above {above} and at most {most}; got {value}")
