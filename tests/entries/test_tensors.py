"""PyTorch tensors on the host in the compiled entries: what they serve, and what they leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests import oracle
from tests.api.test_arrays_of_libraries import make_torch, numpy_of
from tests.dtypes import assert_same, small_values

from gpucoll.errors import ArgumentError, ArgumentTypeError, GpucollError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="this PyTorch does not say where tensors lie: 2.10 does",
)

ROWS = 12  # divides by 1, 2, 3 and 4 ranks
DTYPES = ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int64", "bool"]

# name -> (the call, what the oracle says, how many times x's rows the result has)
CALLS: dict[str, tuple[Any, Any, str | None]] = {
    "all_reduce": (lambda c, x, o, t: c.all_reduce(x, out=o, timeout_s=t), oracle.all_reduce, None),
    "reduce": (lambda c, x, o, t: c.reduce(x, out=o, timeout_s=t), oracle.reduce, None),
    "scan": (lambda c, x, o, t: c.scan(x, out=o, timeout_s=t), oracle.scan, None),
    "exclusive_scan": (
        lambda c, x, o, t: c.exclusive_scan(x, out=o, timeout_s=t),
        oracle.exclusive_scan,
        None,
    ),
    "broadcast": (lambda c, x, o, t: c.broadcast(x, out=o, timeout_s=t), oracle.broadcast, None),
    "all_gather": (lambda c, x, o, t: c.all_gather(x, out=o, timeout_s=t), oracle.all_gather, "P"),
    "gather": (lambda c, x, o, t: c.gather(x, out=o, timeout_s=t), oracle.gather, "P"),
    "reduce_scatter": (
        lambda c, x, o, t: c.reduce_scatter(x, out=o, timeout_s=t),
        oracle.reduce_scatter,
        "1/P",
    ),
    "scatter": (
        lambda c, x, o, t: c.scatter(x if c.rank == 0 else None, out=o, timeout_s=t),
        oracle.scatter,
        "1/P",
    ),
    "all_to_all": (lambda c, x, o, t: c.all_to_all(x, out=o, timeout_s=t), oracle.all_to_all, None),
}


@pytest.fixture
def only_quick(comm, monkeypatch):
    """Return what forbids calls on this communicator to go through Python."""

    def refuse(*_, **__):
        pytest.fail("the compiled entry did not serve this call")

    return lambda: monkeypatch.setattr(comm, "_call", refuse)


@pytest.mark.parametrize("timeout_s", [None, 10, 10.5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.ranks(1, 2, 3)
def test_what_was_seen_before_is_served(comm, only_quick, name, dtype, timeout_s):
    call, expected_of, rows = CALLS[name]
    inputs = [small_values(dtype, ROWS * 5, 3 + rank) for rank in range(comm.world_size)]
    inputs = [values.reshape(ROWS, 5) for values in inputs]
    expected = expected_of(inputs)[comm.rank]
    factor = {None: 1, "P": comm.world_size, "1/P": 1 / comm.world_size}[rows]
    out = make_torch(np.zeros((int(ROWS * factor), 5), inputs[0].dtype))
    x = make_torch(inputs[comm.rank].copy())
    call(comm, x, out, None)
    only_quick()
    for _ in range(2):
        out.fill_(1)
        x_version, version = x._version, out._version
        result = call(comm, x, out, timeout_s)
        assert x._version == x_version
        if expected is None:
            assert result is None
            assert out._version == version
        else:
            assert result is out
            assert out._version == version + 1
            assert_same(numpy_of(out), expected)
    assert_same(numpy_of(x), inputs[comm.rank], "the input")


@pytest.mark.ranks(2)
def test_new_results_and_in_place(comm, only_quick):
    x = torch.full((4, 2), float(comm.rank + 1), requires_grad=True)
    parameter = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    comm.all_reduce(x), comm.all_gather(x), comm.reduce_scatter(x), comm.broadcast(parameter)
    comm.reduce(x, root=1)
    only_quick()
    result = comm.all_reduce(x)
    assert type(result) is torch.Tensor
    assert (result.tolist(), result.requires_grad) == ([[3.0, 3.0]] * 4, False)
    assert comm.all_gather(x).shape == (8, 2)
    assert comm.reduce_scatter(x).tolist() == [[3.0, 3.0]] * 2
    assert (comm.reduce(x, root=1) is None) == (comm.rank == 0)
    assert comm.broadcast(parameter, out=parameter) is parameter
    y = torch.ones(3)
    assert comm.all_reduce(y, out=y) is y
    assert y.tolist() == [2.0] * 3
    assert comm.all_reduce(torch.ones(())).tolist() == 2.0
    assert comm.all_reduce(torch.ones(0, 3)).shape == (0, 3)
    assert comm.all_reduce(torch.ones(8)[5:]).tolist() == [2.0] * 3


@pytest.mark.ranks(2)
def test_tensors_of_inference_mode(comm, only_quick):
    with torch.inference_mode():
        x = torch.ones(3)
        comm.all_reduce(x)
        only_quick()
        assert comm.all_reduce(x, out=x) is x
        assert comm.all_reduce(x).tolist() == [4.0] * 3
    assert x.tolist() == [2.0] * 3


@pytest.mark.ranks(2)
def test_complex_numbers(comm, only_quick):
    x = torch.tensor([1 + 2j, 3 - 1j])
    comm.all_reduce(x)
    with pytest.raises(ArgumentTypeError, match="conjugate view"):
        comm.all_reduce(x.conj())
    with pytest.raises(ArgumentTypeError, match="negated view"):
        comm.all_reduce(x.conj()[:1].imag)
    only_quick()
    assert comm.all_reduce(x, out=x).tolist() == [2 + 4j, 6 - 2j]


def freed(offset=0):
    x = torch.ones(16)[offset : offset + 4]
    x.untyped_storage().resize_(0)
    return x


def negated():
    return torch.ones(4, dtype=torch.complex64).conj()[:1].imag


def expanded():
    return torch.ones(1).expand(4)


INPUTS = {
    "negated": (negated, "is a negated view"),
    "freed": (freed, "its storage was freed"),
    "freed, offset": (lambda: freed(5), "its storage was freed"),
    "sparse": (lambda: torch.ones(4).to_sparse(), "has layout torch.sparse_coo"),
    "meta": (lambda: torch.ones(4, device="meta"), "on the meta device"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        "is quantized",
    ),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(4)], layout=torch.jagged),
        "is a nested tensor|wraps other tensors",
    ),
    "uninitialized": (torch.nn.UninitializedParameter, "uninitialized parameter"),
}
OUTPUTS = {
    "requires grad": (lambda: torch.ones(4, requires_grad=True), "out requires grad"),
    "another dtype": (lambda: torch.ones(4, dtype=torch.float64), "out has dtype float64"),
    "too long": (lambda: torch.ones(5), "out has shape"),
    "NumPy's": (lambda: np.ones(4, np.float32), "out must be of x's library"),
    "shared elements": (expanded, "out has elements that share their memory"),
    "freed": (freed, "its storage was freed"),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.ranks(2)
def test_inputs_that_are_refused(comm, name):
    make, message = INPUTS[name]
    x = torch.ones(4)
    comm.all_reduce(x, out=x)
    for out in (None, torch.ones(4)):
        with pytest.raises(ArgumentTypeError, match=message):
            comm.all_reduce(make(), out=out)
    assert comm.all_reduce(x, out=x).tolist() == [4.0] * 4


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.ranks(2)
def test_outputs_that_are_refused(comm, name):
    make, message = OUTPUTS[name]
    x = torch.ones(4)
    comm.all_reduce(x)
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        comm.all_reduce(x, out=make())
    assert comm.all_reduce(x).tolist() == [2.0] * 4


@pytest.mark.ranks(2)
def test_what_is_left_to_python_is_right(comm):
    x = torch.arange(8.0)
    comm.all_reduce(x)
    comm.all_reduce(torch.ones(4, dtype=torch.uint8))
    assert comm.all_reduce(x[::2]).tolist() == [0.0, 4.0, 8.0, 12.0]
    out = torch.zeros(8)
    comm.all_reduce(x[:4], out=out[::2])
    assert out.tolist() == [0, 0, 2, 0, 4, 0, 6, 0]
    needing = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert comm.all_reduce(torch.ones(3), out=needing) is needing
    with pytest.raises(GpucollError):  # DLPack has the same words for it and uint8
        comm.all_reduce(torch.empty(4, dtype=torch.uint4))


@pytest.mark.ranks(2)
def test_autograd_sees_what_is_written(comm):
    w, x = torch.ones(3, requires_grad=True), torch.ones(3)
    comm.all_reduce(x, out=x)
    y = (w * x).sum()
    comm.all_reduce(x, out=x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    z = (w * x).sum()
    comm.reduce(x, root=0, out=torch.empty(3))  # x itself stays as it is, on every rank
    z.backward()


@pytest.mark.ranks(2)
def test_inside_transforms_of_torch_func(comm):
    comm.all_reduce(torch.ones(3))
    with pytest.raises(ArgumentTypeError, match="no memory"):
        torch.vmap(comm.all_reduce)(torch.ones(2, 3))
    with pytest.raises(ArgumentTypeError, match="no memory"):
        torch.func.functionalize(comm.all_reduce)(torch.ones(3))


@pytest.mark.ranks(2)
def test_a_call_within_a_call_that_looks_at_its_tensors(comm):
    nested: list[Any] = []

    def intrude(_, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            if function is torch.Tensor.is_neg and len(nested) < 3:
                y = torch.full((2,), 5.0)
                nested.append(comm.all_reduce(y, out=y).tolist())
            return function(*args, **(kwargs or {}))

    mode: Any = torch.overrides.TorchFunctionMode
    x, out = torch.arange(3.0), torch.zeros(3)
    comm.all_reduce(x)
    with type("Intrusive", (mode,), {"__torch_function__": intrude})():
        for _ in range(3):
            assert comm.all_reduce(x, out=out) is out
    assert out.tolist() == [0.0, 2.0, 4.0]
    assert nested == [[10.0, 10.0]] * 3


# --- lists ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.ranks(1, 2, 3)
def test_lists(comm, only_quick, dtype):
    shapes = [(1,), (3,), (0, 2), (4, 5), (1000,)]
    everyone = [
        [
            small_values(dtype, int(np.prod(shape)), rank + 7 * place).reshape(shape)
            for rank in range(comm.world_size)
        ]
        for place, shape in enumerate(shapes)
    ]
    expected = [oracle.all_reduce(inputs)[comm.rank] for inputs in everyone]
    kind = getattr(torch, dtype)
    xs = [
        make_torch(inputs[comm.rank].copy()) if inputs[0].size else torch.ones(0, 2, dtype=kind)
        for inputs in everyone
    ]
    outs = [torch.zeros_like(x) for x in xs]
    comm.all_reduce(xs, out=outs)
    only_quick()
    for timeout_s in (None, 10.0):
        given = comm.all_reduce(xs, out=outs, timeout_s=timeout_s)
        assert given is outs
        new = comm.all_reduce(xs)
        for place, values in enumerate(expected):
            assert_same(numpy_of(outs[place]), values)
            assert_same(numpy_of(new[place]), values)
            outs[place].fill_(1)
    versions = [x._version for x in xs]
    assert comm.all_reduce(xs, out=xs) is xs
    assert [x._version for x in xs] == [version + 1 for version in versions]
    for x, values in zip(xs, expected, strict=True):
        assert_same(numpy_of(x), values)


@pytest.mark.ranks(2)
def test_lists_that_are_left_to_python(comm):
    def pair():
        return [torch.ones(3), torch.ones(4)]

    xs = pair()
    comm.all_reduce(xs, out=xs)
    with pytest.raises(ArgumentError, match="out requires grad"):
        comm.all_reduce(pair(), out=[torch.ones(3), torch.ones(4, requires_grad=True)])
    with pytest.raises(ArgumentError, match="share memory"):
        comm.all_reduce(pair(), out=[xs[1][:3], xs[1]])
    with pytest.raises(ArgumentTypeError, match=r"array 1 of the list.*negated"):
        comm.all_reduce([torch.ones(3), negated()])
    mixed = [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(4)[::2]]
    assert [x.tolist() for x in comm.all_reduce(mixed)] == [[2.0] * 3, [2.0] * 2, [2.0] * 2]
    with torch.inference_mode():
        theirs = torch.ones(3)
        both = [theirs, torch.ones(2)]
        comm.all_reduce(both, out=both)
    both = [theirs, torch.ones(2)]
    assert [x.tolist() for x in comm.all_reduce(both)] == [[4.0] * 3, [2.0] * 2]


@pytest.mark.ranks(2)
def test_tensors_with_counts_go_through_the_entry_of_arrays(comm):
    x = torch.arange(6.0).reshape(3, 2) + comm.rank
    own, counts = x[: comm.rank + 1].contiguous(), [1, 2]
    calls = {
        "all_gather": lambda **out: comm.all_gather(own, counts=counts, **out),
        "gather": lambda **out: comm.gather(own, counts=counts, root=1, **out),
        "reduce_scatter": lambda **out: comm.reduce_scatter(x, counts=counts, **out),
        "all_to_all": lambda **out: comm.all_to_all(
            x, send_counts=counts, recv_counts=[comm.rank + 1] * 2, **out
        ),
    }
    expected = {name: call() for name, call in calls.items()}

    def refuse(*_, **__):
        raise AssertionError("Python made this call")

    comm._collectives._run_now = refuse
    for name, call in calls.items():
        result = call()
        if expected[name] is None:  # not the root
            assert [result, call(), call()] == [None] * 3
            continue
        assert torch.equal(result, expected[name])
        out = torch.empty_like(result)
        before = out._version
        assert call(out=out) is out
        assert torch.equal(out, result)
        assert out._version == before + 1
        with torch.no_grad():
            assert torch.equal(call(out=torch.empty_like(result).requires_grad_()), result)
