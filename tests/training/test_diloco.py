"""DiLoCo: what it computes, to the last bit; what it sends; what it refuses."""

from __future__ import annotations

import re
import socket
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpucoll import Compression, GpucollError, MismatchError, UsageError
from gpucoll.training import DiLoCo, LocalSGD, average_parameters
from gpucoll.training.parameters import fragments_of

UNIT = 2.0**-53
"""The most by which a float64 operation is off, of its result."""
FIXTURES = {
    (0, 0.0): ("1 -1 -3 -11 -13 -15 -17 -19 -21 -35 -37 -39 -41 -43 -45 -59",
               "1 -1 -3 -5 -7 -9 -23 -25 -27 -29 -31 -33 -47 -49 -51 -53"),
    (0, 0.5): ("1 -1 -3 -8 -10 -12 -14 -16 -18 -24.5 -26.5 -28.5 -30.5 -32.5 -34.5 -40.25",
               "1 -1 -3 -5 -7 -9 -17 -19 -21 -23 -25 -27 -32 -34 -36 -38"),
    (1, 0.0): ("1 -1 -3 -7 -9 -11 -13 -15 -17 -27 -29 -31 -33 -35 -37 -47",
               "1 -1 -3 -5 -7 -9 -19 -21 -23 -25 -27 -29 -39 -41 -43 -45"),
    (1, 0.5): ("1 -1 -3 -6 -8 -10 -12 -14 -16 -21.5 -23.5 -25.5 -27.5 -29.5 -31.5 -35.75",
               "1 -1 -3 -5 -7 -9 -15 -17 -19 -21 -23 -25 -29 -31 -33 -35"),
    (0, 1.0): (" ".join(str(1 - 2 * step) for step in range(16)),) * 2,
    (1, 1.0): (" ".join(str(1 - 2 * step) for step in range(16)),) * 2,
}  # fmt: skip
"""(delay, mix) -> each fragment after each step, in torchft's fixtures: every 6, gradient 2."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("delay", "mix"), [*FIXTURES])
def test_the_fixtures_of_torchft(comm, delay, mix):
    model = [np.ones(1), np.ones(1)]
    given = {"outer": "sgd", "lr": 2, "fragments": 2, "delay": delay, "mix": mix}
    histories = [[1.0], [1.0]]
    with DiLoCo(comm, model, every=6, **given) as diloco:
        for _ in range(15):
            for parameter in model:
                parameter -= 2.0
            diloco.step()
            for history, parameter in zip(histories, model, strict=True):
                history.append(parameter.item())

    expected = [[float(word) for word in words.split()] for words in FIXTURES[delay, mix]]
    assert histories == expected
    assert diloco.outer_steps == 5


def problem_of(rank, size=7, rows=40):
    """Return the data of a rank: least squares in `size` unknowns, with a Hessian of norm 1."""
    random = np.random.default_rng(rank)
    inputs = random.normal(size=(rows, size))
    return inputs / np.linalg.norm(inputs, 2), random.normal(size=rows)


def gradient(weights, inputs, targets):
    return inputs.T @ (inputs @ weights - targets)


@pytest.mark.ranks(2, 3)
def test_every_step_with_rate_one_is_data_parallel_sgd(comm):
    """Equal up to rounding.

    A step of either rounds each of the P ranks' weights at most P + 3 times. Where the Hessian is
    at most 1 and the rate 1, gradient descent lets no difference grow, so that T steps add up to T
    times as much; the factor 8 is for the gradients' own sums of 40 products.
    """
    steps, weights, expected = 50, np.zeros(7), np.zeros(7)
    data = [problem_of(rank) for rank in range(comm.world_size)]
    largest = 0.0
    with DiLoCo(comm, [weights], every=1, outer="sgd", lr=1) as diloco:
        for _ in range(steps):
            weights -= gradient(weights, *data[comm.rank])
            diloco.step()
            expected -= sum(gradient(expected, *of_rank) for of_rank in data) / comm.world_size
            largest = max(largest, np.abs(expected).max(), 1)

    bound = steps * 8 * (comm.world_size + 3) * UNIT * largest * 7**0.5
    np.testing.assert_allclose(weights, expected, rtol=0, atol=bound)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("outer", [{"outer": "sgd"}, {"outer": "nesterov", "momentum": 0}], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize("delay", [0, 1])
def test_one_rank_keeps_the_bits_of_the_inner_optimizer(comm, outer, dtype, delay):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    random = np.random.default_rng(0)
    # -0.0, numbers far apart and subnormal ones, which a sum would change
    scales = 10.0 ** random.integers(-7, 4, size=200)
    model = [(random.normal(size=200) * scales).astype(kind), np.array([-0.0, 1e-30], kind)]
    alone = [array.copy() for array in model]
    mix = 1 if delay else 0  # what the rank computes in the meantime stays
    with DiLoCo(comm, model, every=3, lr=1, delay=delay, mix=mix, **outer) as diloco:
        for step in range(10):
            for one, other in zip(model, alone, strict=True):
                for array in (one, other):
                    array *= kind.type(-1.1) if isinstance(kind, np.dtype) else kind(-1.1)
                    array[::7] = step * array[::7]
            diloco.step()

    for one, other in zip(model, alone, strict=True):
        assert one.tobytes() == other.tobytes()


def train(comm, steps=24, dtype=np.float32, **given):
    """Train two arrays on data of this rank's own; return them and the outer state."""
    random = np.random.default_rng(comm.rank)
    model = [random.normal(size=(50, 3)).astype(dtype), random.normal(size=70).astype(dtype)]
    with DiLoCo(comm, model, **{"every": 4, **given}) as diloco:
        for _ in range(steps):
            for array in model:
                array -= (0.1 * array + random.normal(size=array.shape)).astype(dtype)
            diloco.step()
        return model, diloco.state_dict()


WAYS = [
    {},
    {"fragments": 2, "delay": 1, "mix": 0.25},
    {"compression": "int8"},
    {"compression": Compression("float8_block", seed=3), "fragments": 2},
    {"compression": "bfloat16", "delay": 2},
    {"compression": Compression("topk", chunk=64, density=1 / 4), "outer": "sgd", "fragments": 2},
]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("given", WAYS, ids=str)
def test_the_same_bits_on_every_rank(comm, given):
    model, state = train(comm, **given)

    bits = [array.tobytes() for array in state["values"]]
    bits += [array.tobytes() for kept in state["memory"] for array in kept.values()]
    assert comm.all_gather_object(bits) == [bits] * comm.world_size
    assert state["outer_steps"] == 6 * given.get("fragments", 1)
    if given.get("fragments", 1) == 1:  # all arrays have just been written
        parameters = np.concatenate([array.ravel() for array in model])
        np.testing.assert_array_equal(parameters, state["values"][0])


@pytest.mark.ranks(2)
def test_a_step_that_starts_a_transfer_waits_for_nobody(comm):
    model = [np.full(100_000, float(comm.rank))]
    with comm.duplicate() as own, DiLoCo(own, model, every=2, delay=1, mix=1) as diloco:
        if comm.rank == 1:
            comm.recv(source=0)
        diloco.step()
        if comm.rank == 0:
            comm.send(0, dest=1)  # only now does rank 1 begin
        diloco.step()
        assert diloco.outer_steps == 1


@pytest.mark.ranks(2)
def test_an_outer_function_of_the_program(comm):
    def heavy_ball(values, mean, memory):
        memory["velocity"] = 0.5 * memory.get("velocity", 0.0) + mean
        return values - memory["velocity"]

    model = [np.zeros(2)]
    with DiLoCo(comm, model, every=1, outer=heavy_ball) as diloco:
        for _ in range(3):
            model[0] -= 1 + 2 * comm.rank  # the mean pseudo-gradient is 2
            diloco.step()
        assert model[0].tolist() == [-8.5, -8.5]  # -2, -2 - 3, -5 - 3.5
        assert diloco.state_dict()["memory"][0]["velocity"].tolist() == [3.5, 3.5]
    with (
        DiLoCo(comm, model, every=1, outer=lambda values, *_: values[:1]) as other,
        pytest.raises(UsageError, match=r"shape \(2,\); got \(1,\)"),
    ):
        other.step()


@pytest.mark.ranks(3)
def test_local_sgd_and_averages(comm):
    model: list[Any] = [np.zeros(3, np.float16), np.zeros((), np.float64)]
    with LocalSGD(comm, iter(model), every=2) as local:
        assert local.steps_to_sync == 2
        for _ in range(2):
            for array in model:
                array += comm.rank
            local.step()
        assert [array.tolist() for array in model] == [[2.0] * 3, 2.0]
        assert (local.steps_to_sync, local.outer_steps) == (2, 1)

    statistics = [np.full(2, comm.rank, np.float32)]
    assert average_parameters(comm, statistics)[0] is statistics[0]
    assert statistics[0].tolist() == [1, 1]


@pytest.mark.ranks(2)
def test_error_feedback_of_sparse_steps_loses_nothing(comm):
    """The inner steps and all sums are exact, so that what has not arrived is in the residuals."""
    how = Compression("topk", density=1 / 8, bits=2, chunk=64, decay=1)
    random = np.random.default_rng(comm.rank)
    model, given = [np.zeros(200, np.float32)], np.zeros(200)
    with DiLoCo(comm, model, every=1, outer="sgd", lr=1, compression=how) as diloco:
        for _ in range(20):
            inner = (random.integers(-63, 64, size=200) / 64).astype(np.float32)
            given -= inner
            model[0] += inner
            diloco.step()
        residual = diloco.state_dict()["residuals"][0]

    total = comm.all_reduce(given)
    np.testing.assert_array_equal(-2.0 * model[0] + comm.all_reduce(residual.astype(float)), total)
    assert np.abs(residual).max() > 0


# --- what travels ---------------------------------------------------------------------------------


def sent_bytes(comm):
    """Return the bytes of a host's connections for large arrays, as the kernel counts them."""
    total = 0
    for end in comm._group.bulk._ends.sockets.values():
        info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        sent, again = struct.unpack_from("<QQ", info, 200)  # tcpi_bytes_sent, tcpi_bytes_retrans
        total += sent - again
    return total


def send_two_sizes(comm, given, counts):
    """Return the bytes of an outer step by the kernel's count and by the formula, for two sizes."""
    found = []
    for count in counts:
        model = [np.ones(count, np.float32)]
        with DiLoCo(comm, model, every=1, outer="sgd", **given) as diloco:
            diloco.step()
            comm.barrier()
            before = sent_bytes(comm)
            diloco.step()
            comm.barrier()
            found += [(sent_bytes(comm) - before, diloco.bytes_per_outer_step)]
            assert diloco.bytes_sent == 2 * diloco.bytes_per_outer_step
    return found


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", ["abc", "ab", "abcd"])
@pytest.mark.parametrize(
    ("given", "of_value"),
    [
        ({}, 4.0),
        ({"compression": "int8"}, 1 + 4 / 256),
        ({"compression": "bfloat16"}, 2.0),
        ({"compression": Compression("topk", density=1 / 4)}, None),
    ],
    ids=str,
)
def test_the_bytes_on_the_wire_are_those_of_the_formula(
    hosts_with_schedules, placed, given, of_value
):
    hosts, counts = len(placed), (12 * 4096 * 25, 12 * 4096 * 50)
    for found in hosts_with_schedules.call(placed, send_two_sizes, given, counts):
        for (counted, formula), count in zip(found, counts, strict=True):
            if of_value is None:
                assert formula == (hosts - 1) * count // 4096 * 1024 * 14 / 8
            else:
                assert formula == 2 * count * of_value * (hosts - 1) / hosts
            assert 0 <= counted - formula <= 256  # what begins and ends a call
        (small, of_small), (large, of_large) = found
        assert large - small == of_large - of_small


def test_fragments_have_about_equal_sizes():
    assert fragments_of([5], 1) == [(0, 1)]
    assert fragments_of([1, 1, 1, 1], 2) == [(0, 2), (2, 4)]
    assert fragments_of([100, 1, 1, 1], 3) == [(0, 1), (1, 2), (2, 4)]
    assert fragments_of([1, 1, 100], 3) == [(0, 1), (1, 2), (2, 3)]
    assert fragments_of([3, 3, 3, 9], 2) == [(0, 3), (3, 4)]
    assert fragments_of([0, 0], 2) == [(0, 1), (1, 2)]


# --- what is refused ------------------------------------------------------------------------------

FLOATS = [np.zeros(3, np.float32), np.zeros(2, np.float32)]
BAD = [
    ({"every": 0}, "every must be at least 1; got 0"),
    ({"every": 2.5}, "every must be an int; got 2.5"),
    ({"every": True}, "every must be an int; got True"),
    ({"fragments": 3, "every": 3}, "3 is more than the 2 parameters"),
    ({"fragments": 2, "every": 3}, "every must be a multiple of fragments; got 3, 2"),
    ({"delay": 4}, "delay must be less than every / fragments, which is 4; got 4"),
    ({"delay": 2, "fragments": 2}, "which is 2; got 2"),
    ({"delay": -1}, "delay must be at least 0; got -1"),
    ({"mix": 1.01}, "mix must be in 0..1; got 1.01"),
    ({"mix": float("nan")}, "mix must be in 0..1; got nan"),
    ({"mix": "half"}, "mix must be a number; got 'half'"),
    ({"lr": float("inf")}, "lr must be in 0..inf; got inf"),
    ({"momentum": -0.1}, "momentum must be in 0..1; got -0.1"),
    ({"outer": "adam"}, "outer must be nesterov, sgd or a function; got 'adam'"),
    ({"outer": 3}, "outer must be nesterov, sgd or a function; got 3"),
    ({"compression": "int4"}, "compression must be one of float16, bfloat16, int8_block"),
    ({"compression": 8}, "compression must be None, a name or a Compression; got 8"),
    ({"compression": "topk"}, "pass outer='sgd', or momentum=0"),
    ({"parameters": []}, "parameters has no array"),
    ({"parameters": FLOATS[0]}, "a list or another iterable of arrays; got one ndarray"),
    ({"parameters": 7}, "another iterable of arrays; got one int"),
    ({"parameters": [*FLOATS, 1.5]}, "parameter 2 must be an array of NumPy"),
    ({"parameters": [np.zeros(2, int)]}, "parameter 0 is int64: only float16, bfloat16"),
    ({"parameters": [np.zeros(2, complex)]}, "parameter 0 is complex128"),
    ({"parameters": [np.broadcast_to(np.zeros(1), 2)]}, "parameter 0 is read-only"),
    ({"parameters": [FLOATS[0], FLOATS[0]]}, "parameters has an array twice"),
    ({"parameters": [np.zeros(2)], "compression": "int8"}, "parameters; one is float64"),
]


def make(comm, given):
    given = {"parameters": FLOATS, "every": 4, **given}
    DiLoCo(comm, given.pop("parameters"), **given)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("given", "text"), BAD, ids=str)
def test_bad_input_is_an_error_on_every_rank_before_anything_moves(comm, given, text):
    if comm.rank == 1:  # all others are right
        with pytest.raises(UsageError, match=re.escape(text)):
            make(comm, given)
    else:
        with pytest.raises(UsageError, match="rank 1 of 3 raised: .*" + re.escape(text)):
            make(comm, {})
    assert comm.all_reduce(1) == 3  # it stays usable
    assert not any(array.any() for array in FLOATS)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"every": 8}, "every is 4 on rank 0 of 3, but 8 on rank 2"),
        ({"lr": 0.5}, "outer is nesterov, lr=0.7, momentum=0.9 on rank 0 of 3, but nesterov, lr"),
        ({"compression": "int8"}, "compression is None on rank 0 of 3, but int8 on rank 2"),
        ({"mix": 0.5}, "mix is 0.0 on rank 0 of 3, but 0.5"),
        ({"parameters": FLOATS[:1]}, "the number of parameters is 2 on rank 0 of 3, but 1 on"),
        ({"parameters": [FLOATS[0], FLOATS[1][None]]}, "parameter 1 is float32 of shape (2,) on "),
        ({"parameters": [FLOATS[0].astype("f2"), FLOATS[1]]}, "parameter 0 is float32 of shape"),
    ],
    ids=str,
)
def test_ranks_that_differ_are_told_before_anything_moves(comm, given, text):
    with pytest.raises(MismatchError, match=re.escape(text)):
        make(comm, given if comm.rank == 2 else {})
    if "parameters" in given:
        with pytest.raises(MismatchError, match=re.escape(text)):
            average_parameters(comm, given["parameters"] if comm.rank == 2 else FLOATS)
    assert comm.all_reduce(1) == 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize("given", WAYS, ids=str)
def test_arrays_without_elements(comm, given):
    model = [np.zeros((0, 3), np.float32), np.zeros(0, np.float32)]
    with DiLoCo(comm, model, every=4, **given) as diloco:
        for _ in range(8):
            diloco.step()
        assert diloco.outer_steps == 2 * given.get("fragments", 1)
        assert diloco.bytes_sent == 0


@pytest.mark.ranks(1)
def test_what_a_step_refuses(comm):
    with pytest.raises(UsageError, match=r"must be a gpucoll\.Communicator; got int"):
        DiLoCo(3, FLOATS, every=4)  # type: ignore[arg-type]
    diloco = DiLoCo(comm, [np.zeros(3), np.zeros(2)], every=4)
    with pytest.raises(UsageError, match="there are 2 parameters; got 1"):
        diloco.step([np.zeros(3)])
    with pytest.raises(
        UsageError, match=r"parameter 1 was float64 of shape \(2,\) before, and is "
    ):
        diloco.step([np.zeros(3), np.zeros(2, np.float32)])
    assert diloco.steps_to_sync == 4  # neither was counted
    new = [np.ones(3), np.ones(2)]
    assert diloco.step(new)[0] is new[0]
    diloco.close()
    diloco.close()
    with pytest.raises(GpucollError, match="this DiLoCo is closed"):
        diloco.step()


GUIDE = (Path(__file__).resolve().parents[2] / "docs/training.md").read_text("utf-8")


@pytest.mark.ranks(2)
def test_the_guides_example_runs(comm):
    (code,) = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    exec(compile(code, "training.md", "exec"), {"comm": comm, "np": np})  # noqa: S102  (ours)
