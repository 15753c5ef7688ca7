"""The mean of models that arrive one after the other: its bits, its memory, what it refuses."""

from __future__ import annotations

import math
import subprocess
import sys
import tracemalloc
from typing import Any

import ml_dtypes  # noqa: F401  (makes np.dtype("bfloat16") known)
import numpy as np
import pytest
from tests.dtypes import any_values, assert_same

from gpucoll import ArgumentError, ArgumentTypeError, MismatchError, StateError
from gpucoll.federated import WeightedMean
from gpucoll.testing import device_arrays

SHAPES = ((3, 5), (), (0, 4), (1027,), (2, 3, 64))
DTYPES = ("float32", "float64", "float16", "bfloat16")


def model_of(client: int, dtypes=DTYPES) -> dict[str, Any]:
    """Return a client's model: an array of each shape and dtype, of random normal values."""
    random = np.random.default_rng(client)
    return {
        f"{dtype}{shape}": np.asarray(random.normal(size=shape)).astype(np.dtype(dtype))
        for dtype in dtypes
        for shape in SHAPES
    }


def mean_of(arrays: list[Any], weights: list[float]) -> np.ndarray:
    """Return the mean by the lines that `WeightedMean` documents."""
    dtype = arrays[0].dtype
    wide: Any = np.float64 if dtype == np.float64 else np.float32
    factors = [wide(weight) for weight in weights]
    total = factors[0] * arrays[0].astype(wide)
    for factor, array in zip(factors[1:], arrays[1:], strict=True):
        total = total + factor * array.astype(wide)
    return np.asarray(total / wide(math.fsum(factors))).astype(dtype)


WEIGHTS = {
    "equal": [1, 1, 1, 1, 1],
    "examples": [600, 37, 12041, 1, 2**24 - 1],
    "rounded": [1 + 0.99 * 2**-24] * 3,  # each is 1 in float32, and 3 of them are not 3
    "fractions": [0.1, 0.7, 1e-20, 3.3, 1e20],
}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_the_bits_of_the_documented_lines(weights):
    models = [model_of(client) for client in range(len(weights))]
    mean = WeightedMean(models[0])

    for turn in range(2):  # the second time after a reset
        for model, weight in zip(models, weights, strict=True):
            mean.add(model, weight)
        got = mean.result()
        assert mean.clients == len(weights)
        assert mean.weight == pytest.approx(math.fsum(weights), rel=1e-6)
        for name, array in got.items():
            assert_same(array, mean_of([model[name] for model in models], weights), name)
            assert array.dtype == models[0][name].dtype
        mean.reset()
        assert (mean.clients, mean.weight) == (0, 0), turn


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_values(dtype):
    arrays = [any_values(dtype, 1000, seed) for seed in range(4)]
    weights = [3, 1, 0.5, 7]
    mean = WeightedMean([arrays[0]])
    for array, weight in zip(arrays, weights, strict=True):
        mean.add([array], weight)
    with np.errstate(all="ignore"):
        assert_same(mean.result()[0], mean_of(arrays, weights))


def test_one_model_with_weight_one_is_itself():
    zeros = np.array([0.0, -0.0, -1.5, np.inf], np.float32)
    mean = WeightedMean([zeros])
    mean.add([zeros])
    assert mean.result()[0].tobytes() == zeros.tobytes()


def test_integer_weights_are_repetitions():
    """Small integers times small integers: every sum is exact."""
    random = np.random.default_rng(3)
    arrays = [random.integers(-8, 9, 100).astype(np.float32) for _ in range(3)]
    weighted, repeated = WeightedMean([arrays[0]]), WeightedMean([arrays[0]])
    for array, weight in zip(arrays, (3, 1, 4), strict=True):
        weighted.add([array], weight)
        for _ in range(weight):
            repeated.add([array])
    np.testing.assert_array_equal(weighted.result()[0], repeated.result()[0])


def test_a_mean_so_far_and_an_array_to_write_to():
    mean = WeightedMean((np.zeros(4), np.zeros(2, np.float16)))
    out = (np.zeros(4), np.zeros((4,), np.float16)[::2])
    mean.add((np.full(4, 1.0), np.full(2, 1, np.float16)))
    assert mean.result()[0].tolist() == [1.0] * 4
    mean.add((np.full(4, 2.0), np.full(2, 2, np.float16)))
    returned = mean.result(out)
    assert isinstance(returned, tuple)
    assert [array.tolist() for array in out] == [[1.5] * 4, [1.5] * 2]
    assert all(one is other for one, other in zip(returned, out, strict=True))


def test_a_model_of_weight_zero_is_not_read():
    mean = WeightedMean([np.zeros(2)])
    mean.add([np.array([np.nan, np.inf])], 0)
    mean.add([np.array([1.0, 2.0])], 3)
    mean.add([np.array([np.nan, np.inf])], 0)
    assert mean.result()[0].tolist() == [1.0, 2.0]
    assert mean.clients == 3


def test_arrays_that_are_not_contiguous_and_keys_in_another_order():
    mean = WeightedMean({"a": np.zeros((3, 2)), "b": np.zeros(2)})
    values = np.arange(6.0).reshape(2, 3)
    mean.add({"b": np.arange(4.0)[::2], "a": values.T})
    got = mean.result()
    assert list(got) == ["a", "b"]
    np.testing.assert_array_equal(got["a"], values.T)
    assert got["b"].tolist() == [0.0, 2.0]


@pytest.mark.parametrize(
    ("like", "error", "text"),
    [
        (np.zeros(3), ArgumentTypeError, "like must be a list, tuple or dict of arrays; got numpy"),
        ([], ArgumentError, "like has no array"),
        ([1.0], ArgumentTypeError, r"like\[0\] must be an array; got builtins.float"),
        ({"w": "text"}, ArgumentTypeError, r"like\['w'\] must be an array"),
        ([np.zeros(2, int)], ArgumentTypeError, r"like\[0\] is int64: only float16, bfloat16"),
    ],
)
def test_what_has_no_mean(like, error, text):
    with pytest.raises(error, match=text):
        WeightedMean(like)


GOOD = {"a": np.ones((3, 2), np.float32), "b": np.ones(4, np.float32)}
BAD_MODELS = {
    "missing": ({"a": GOOD["a"]}, ArgumentError, r"must have 2 arrays; missing: \['b'\]"),
    "other": (GOOD | {"c": GOOD["a"]}, ArgumentError, r"missing: \[\], not expected: \['c'\]"),
    "shape": (
        GOOD | {"b": np.ones(5, np.float32)},
        ArgumentError,
        r"arrays\['b'\] is float32 of shape \(5,\); expected float32 of shape \(4,\)",
    ),
    "dtype": (GOOD | {"b": np.ones(4)}, ArgumentError, r"arrays\['b'\] is float64"),
    "list": (list(GOOD.values()), ArgumentTypeError, "arrays must be a dict; got"),
    "array": (np.ones(3), ArgumentTypeError, "must be a list, tuple or dict of arrays"),
}
BAD_WEIGHTS = {
    "negative": (-1, ArgumentError, "weight must be at least 0 and finite; got -1"),
    "nan": (math.nan, ArgumentError, "finite; got nan"),
    "infinite": (math.inf, ArgumentError, "finite; got inf"),
    "huge": (10**400, ArgumentError, "at least 0 and finite"),
    "large": (1e39, ArgumentError, "weight 1e[+]39 is out of the range of float32"),
    "small": (1e-39, ArgumentError, "weight 1e-39 is out of the range of float32"),
    "bool": (True, ArgumentTypeError, "weight must be a number; got True"),
    "text": ("3", ArgumentTypeError, "weight must be a number; got '3'"),
    "complex": (1j, ArgumentTypeError, "weight must be a number"),
}


@pytest.mark.parametrize(("model", "error", "text"), BAD_MODELS.values(), ids=BAD_MODELS)
def test_a_model_that_does_not_fit_changes_nothing(model, error, text):
    mean = WeightedMean(GOOD)
    mean.add(GOOD, 2)
    with pytest.raises(error, match=text):
        mean.add(model)
    assert (mean.clients, mean.weight) == (1, 2)
    assert mean.result()["b"].tolist() == [1.0] * 4


@pytest.mark.parametrize(("weight", "error", "text"), BAD_WEIGHTS.values(), ids=BAD_WEIGHTS)
def test_a_weight_that_is_none_changes_nothing(weight, error, text):
    mean = WeightedMean(GOOD)
    mean.add(GOOD, 2)
    with pytest.raises(error, match=text):
        mean.add(GOOD, weight)
    assert (mean.clients, mean.weight) == (1, 2)
    assert mean.result()["b"].tolist() == [1.0] * 4


def test_weights_whose_sum_is_too_large():
    mean = WeightedMean(GOOD)
    mean.add(GOOD, 1e38)
    with pytest.raises(ArgumentError, match="out of the range of float32"):
        mean.add(GOOD, 1e38)
    assert mean.result()["b"].tolist() == [1.0] * 4


def test_arrays_that_are_not_in_host_memory():
    mean = WeightedMean([np.zeros(3)])
    with pytest.raises(ArgumentTypeError, match=r"arrays\[0\] lies on host:0: copy it to host"):
        mean.add([device_arrays.zeros(3, device=0)])


def test_no_model_and_no_weight():
    mean = WeightedMean(GOOD)
    with pytest.raises(StateError, match="the mean of no model: call add"):
        mean.result()
    mean.add(GOOD, 0)
    with pytest.raises(StateError, match="the weights of all 1 models are 0"):
        mean.result()
    mean.add(GOOD, 5)
    with pytest.raises(ArgumentError, match=r"out\['b'\] is float32 of shape \(1,\)"):
        mean.result(GOOD | {"b": np.ones(1, np.float32)})
    locked = np.ones(4, np.float32)
    locked.flags.writeable = False
    with pytest.raises(ArgumentError, match="out is read-only"):
        mean.result({"a": np.ones((3, 2), np.float32), "b": locked})


def test_a_sum_that_was_interrupted_is_not_used(monkeypatch):
    mean = WeightedMean(GOOD)
    mean.add(GOOD)

    def interrupted(*_given, **_named):
        raise KeyboardInterrupt

    monkeypatch.setattr("gpucoll.federated.aggregation.add_scaled", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mean.add(GOOD)
    monkeypatch.undo()
    for use in (mean.result, lambda: mean.add(GOOD)):
        with pytest.raises(StateError, match=r"was interrupted: call reset\(\) first"):
            use()
    mean.reset()
    mean.add(GOOD)
    assert mean.result()["b"].tolist() == [1.0] * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_does_not_depend_on_the_number_of_clients(dtype):
    """Two models: the sum and the one that is added; and a constant for Python's objects."""
    like = [np.zeros(1 << 18, dtype), np.zeros((3, 1 << 16), dtype)]
    of_model = sum(array.nbytes for array in like)
    of_sum = of_model * (1 if dtype == "float32" else 2)
    peaks: list[int] = []
    first = WeightedMean(like)
    for _ in range(2):  # kernels are loaded, which takes memory of its own
        first.add(like)
    first.result()
    del first
    for clients in (2, 40):
        tracemalloc.start()
        mean = WeightedMean(like)
        for client in range(clients):
            mean.add([np.full(array.shape, client, dtype) for array in like], client + 1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        mean.result()
        at_the_end = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peaks[-1] <= of_sum + of_model + (64 << 10)
        assert at_the_end <= of_sum + of_model + (256 << 10)
    assert abs(peaks[1] - peaks[0]) < 64 << 10
    assert mean.size_bytes == of_sum


PROGRAM = """
import sys
import numpy as np
from gpucoll.federated import WeightedMean

def peak_bytes():  # since this program began; ru_maxrss would be that of the process before it
    with open("/proc/self/status") as status:
        return int(status.read().partition("VmHWM:")[2].split()[0]) * 1024

clients, size = int(sys.argv[1]), 4 << 20
mean = WeightedMean([np.zeros(1, np.float32)])
mean.add([np.zeros(1, np.float32)])  # the kernels are loaded
mean = WeightedMean([np.empty(size, np.float32)])
before = peak_bytes()
for client in range(clients):
    mean.add([np.full(size, client, np.float32)], 2)
print(peak_bytes() - before)
"""


def test_resident_memory_of_a_process():
    """The same, by the operating system: two models of 16 MiB for 20 clients."""
    command = [sys.executable, "-c", PROGRAM, "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert 1.9 * (16 << 20) < int(done.stdout) < 2.3 * (16 << 20)


@pytest.mark.ranks(3)
def test_the_mean_over_ranks_is_that_of_their_sums_in_rank_order(comm):
    """Rank 1 has added none, so that ranks 0 and 2 add two and three models."""
    weights = [[2, 5], [], [1, 7, 3]]
    names = [f"{dtype}(1027,)" for dtype in DTYPES]
    models = [
        [{name: model_of(10 * rank + client)[name] for name in names} for client in range(len(own))]
        for rank, own in enumerate(weights)
    ]
    mean = WeightedMean(models[0][0])
    for model, weight in zip(models[comm.rank], weights[comm.rank], strict=True):
        mean.add(model, weight)
    mean.all_reduce(comm)

    assert (mean.clients, mean.weight) == (5, 18)
    for name, array in mean.result().items():
        wide: Any = np.float64 if name.startswith("float64") else np.float32
        sums = []
        for own, given in zip(models, weights, strict=True):
            total: Any = np.full(1027, -0.0, wide)
            for model, weight in zip(own, given, strict=True):
                total = total + wide(weight) * model[name].astype(wide)
            sums.append(total)
        expected = ((sums[0] + sums[1] + sums[2]) / wide(18)).astype(array.dtype)
        assert_same(array, expected, name)


@pytest.mark.ranks(3)
def test_weights_whose_sum_over_ranks_is_too_large(comm):
    mean = WeightedMean(GOOD)
    mean.add(GOOD, 1.6e38)
    with pytest.raises(ArgumentError, match="add up to more than float32 holds"):
        mean.all_reduce(comm)
    assert mean.result()["b"].tolist() == [1.0] * 4
    mean = WeightedMean([np.ones(2)])
    mean.add([np.ones(2)], 8e307)
    with pytest.raises(ArgumentError, match="add up to more than float64 holds"):
        mean.all_reduce(comm)


@pytest.mark.ranks(2)
def test_other_arrays_and_errors_of_other_ranks(comm):
    mean = WeightedMean([np.zeros(3 + comm.rank, np.float32)])
    mean.add([np.ones(3 + comm.rank, np.float32)])
    with pytest.raises(MismatchError, match=r"array 0 is float32 of shape \(3,\) on rank 0 of 2"):
        mean.all_reduce(comm)
    assert mean.clients == 1
    if comm.rank == 1:
        mean._is_whole = False
    with pytest.raises((ArgumentError, StateError), match="interrupted"):
        mean.all_reduce(comm)
    assert comm.all_reduce(1) == 2
    with pytest.raises(ArgumentTypeError, match="comm must be"):
        mean.all_reduce(None)  # type: ignore[arg-type]
