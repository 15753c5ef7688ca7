"""`secure_all_reduce`: the sum over ranks, of which none sees what another one passes."""

from __future__ import annotations

from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
from tests.shrinking import die, results

from gpucoll import ArgumentError, ArgumentTypeError, Communicator, MismatchError, PeerLostError
from gpucoll.federated import secure_all_reduce


def x_of(rank, size, dtype=np.float32):
    return np.random.default_rng(rank).normal(size=size).astype(dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_integers_are_added_exactly(ranks, size, dtype):
    draws = [
        np.random.default_rng(rank).integers(0, np.iinfo(dtype).max, (3, 50), dtype, endpoint=True)
        for rank in range(size)
    ]
    expected = np.add.reduce(draws, dtype=dtype)

    for total in ranks.call(size, lambda comm: secure_all_reduce(comm, draws[comm.rank])):
        assert total.dtype == dtype
        assert np.array_equal(total, expected)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("levels", [1, 100, 1 << 20, 1 << 40])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_floats_differ_by_the_bound_at_most(comm, dtype, levels, rounding):
    size, clip = 200_001, 1.5
    total = secure_all_reduce(
        comm, x_of(comm.rank, size, dtype), clip=clip, levels=levels, rounding=rounding
    )

    clipped = [np.clip(x_of(r, size, dtype).astype(np.float64), -clip, clip) for r in range(3)]
    bound = 3 * clip / levels / (2 if rounding == "nearest" else 1)
    rounded = 3 * clip * (float(np.finfo(dtype).eps) + 2.0**-50)
    assert total.dtype == dtype
    assert np.abs(total.astype(np.float64) - np.add.reduce(clipped)).max() <= bound + rounded
    assert len(set(comm.all_gather_object(total.tobytes()))) == 1


@pytest.mark.ranks(3)
def test_the_sum_of_rounded_floats_is_exact(comm):
    """Multiples of the step are no matter of rounding: the sum is that of the fractions."""
    steps = [np.random.default_rng(r).integers(-1000, 1001, 500) for r in range(3)]
    x = steps[comm.rank] * (3.0 / 1000)
    total = secure_all_reduce(comm, x, clip=np.float64(3), levels=1000)
    exact = [
        float(Fraction(int(sum(s)), 1) * Fraction(3.0 / 1000)) for s in zip(*steps, strict=True)
    ]
    assert total.tolist() == exact


@pytest.mark.ranks(2)
def test_stochastic_rounding_is_right_on_average(comm):
    """Of 40,000 values at 0.3 of a step, each rank rounds 0.3 up; 6 standard deviations around."""
    size = 40_000
    x = np.full(size, 0.3)
    seed = comm.rank
    total = secure_all_reduce(comm, x, clip=10.0, levels=10, rounding="stochastic", seed=seed)
    assert set(total.tolist()) == {0.0, 1.0, 2.0}
    deviation = np.sqrt(2 * 0.3 * 0.7 / size)
    assert abs(total.mean() - 0.6) < 6 * deviation
    again = secure_all_reduce(comm, x, clip=10.0, levels=10, rounding="stochastic", seed=seed)
    assert np.array_equal(total, again)


@pytest.mark.ranks(3)
def test_what_travels_is_masked(comm):
    """Zeros are passed: what reaches the all_reduce is uniform, and other words each time."""
    seen = []
    original = Communicator.all_reduce

    def listening(self, x, **given):
        seen.append(x.copy())
        return original(self, x, **given)

    with mock.patch.object(Communicator, "all_reduce", listening):
        for _ in range(2):
            assert not secure_all_reduce(comm, np.zeros(65_536, np.uint32)).any()
    assert len(seen) == 2
    for words in seen:
        counts = np.bincount(words >> 24, minlength=256)
        statistic = ((counts - 256.0) ** 2 / 256).sum()
        assert abs(statistic - 255) < 6 * np.sqrt(2 * 255)
    assert (seen[0] == seen[1]).mean() < 0.001


@pytest.mark.ranks(2)
@pytest.mark.parametrize("x", [np.float32(0.5), np.zeros((0, 3)), np.ones((2, 3, 4))[:, ::2]])
def test_any_shape(comm, x):
    total = secure_all_reduce(comm, x, clip=1.0, levels=2)
    assert total.shape == np.shape(x)
    assert np.array_equal(total, 2 * x)


@pytest.mark.ranks(2)
def test_settings_may_be_numbers_of_numpy(comm):
    clip, levels = [(np.float16(2), np.int64(1 << 20)), (2, 1 << 20)][comm.rank]
    total = secure_all_reduce(comm, np.ones(3), clip=clip, levels=levels)
    assert total.tolist() == [2.0] * 3


@pytest.mark.ranks(2)
def test_sums_beyond_the_dtype_are_infinite(comm):
    """Without a warning, which would be an error here."""
    total = secure_all_reduce(comm, np.full(3, 60_000, np.float16), clip=65_504.0, levels=1 << 20)
    assert total.tolist() == [np.inf] * 3


class Unreadable:
    """An array that raises, as a tensor of PyTorch does that requires a gradient."""

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("cannot be read")


BAD = [
    (np.ones(3), {"clip": 1.0}, ArgumentError, "levels must be an int"),
    (np.ones(3), {"levels": 5}, ArgumentError, "clip must be a positive number; got None"),
    (np.ones(3), {"clip": -1.0, "levels": 5}, ArgumentError, "clip must be a positive number"),
    (np.ones(3), {"clip": 1e-308, "levels": 1 << 20}, ArgumentError, "clip / levels"),
    (np.ones(3), {"clip": 1.0, "levels": 1 << 62}, ArgumentError, "levels must be an int of 1 to"),
    (np.ones(3, np.uint8), {"clip": 1.0}, ArgumentError, "clip and levels are for floats"),
    (np.ones(3), {"clip": 1, "levels": 5, "rounding": "up"}, ArgumentError, "rounding must be"),
    (np.array([np.nan]), {"clip": 1.0, "levels": 5}, ArgumentError, "has a NaN"),
    (
        np.ones(3),
        {"clip": 1, "levels": 5, "rounding": "stochastic", "seed": -1},
        ValueError,
        "expected non-negative integer",
    ),
    ([[1.0], 2.0], {"clip": 1.0, "levels": 5}, ValueError, "inhomogeneous"),
    (Unreadable(), {"clip": 1.0, "levels": 5}, RuntimeError, "cannot be read"),
    (np.ones(3), {"clip": True, "levels": 5}, ArgumentError, "clip must be a positive number"),
    (np.ones(3, np.int32), {}, ArgumentTypeError, "got int32"),
    (np.ones(3, complex), {}, ArgumentTypeError, "got complex128"),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", range(len(BAD)))
def test_wrong_arguments_of_one_rank_are_an_error_on_all(comm, case):
    x, given, error, text = BAD[case]
    if comm.rank == 0:
        with pytest.raises(error, match=text):
            secure_all_reduce(comm, x, **given)
    else:
        with pytest.raises(ArgumentError, match=f"rank 0 of 2 raised: .*{text}"):
            secure_all_reduce(comm, np.ones(3), clip=1.0, levels=5)
    assert secure_all_reduce(comm, np.array([comm.rank + 1], np.uint8)).tolist() == [3]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("x", "given", "text"),
    [
        (
            np.ones(4),
            {},
            r"x is float64 of shape \(3,\) on rank 0 of 2, but float64 of shape \(4,\)",
        ),
        (np.ones(3, np.float32), {}, "float32 of shape"),
        (np.ones(3), {"clip": 2.0}, "clip is 1.0 on rank 0 of 2, but 2.0"),
        (np.ones(3), {"levels": 6}, "levels is 5 on rank 0 of 2, but 6"),
        (np.ones(3), {"rounding": "stochastic"}, "rounding is 'nearest'"),
    ],
)
def test_different_arguments_are_a_mismatch(comm, x, given, text):
    own = {"clip": 1.0, "levels": 5, **(given if comm.rank else {})}
    with pytest.raises(MismatchError, match=text):
        secure_all_reduce(comm, x if comm.rank else np.ones(3), **own)


def test_between_hosts(hosts):
    def program(comm):
        x = np.full(200_000, comm.rank + 1, np.uint32)  # above what goes in one small call
        return secure_all_reduce(comm, x).tolist() == [6] * len(x)

    assert hosts.call("aab", program) == [True] * 3


def test_a_lost_rank_is_an_error_and_the_others_go_on(rank_server):
    def program(comm):
        if comm.rank == 1:
            die()
        with pytest.raises(PeerLostError, match="rank 1"):
            secure_all_reduce(comm, np.ones(5, np.uint32))
        with comm.shrink() as smaller:
            return secure_all_reduce(smaller, np.ones(5, np.uint32)).tolist()

    with rank_server.fork(3) as pool:
        pool.start(program)
        assert results(pool.collect(), but=[1]) == [[2] * 5] * 2
