"""PyTorch tensors; those of GPUs as far as this can be told without one."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from tests.moving import move

from gpucoll.arrays.operands import (
    destination_of,
    is_sequence_of_arrays,
    prepare,
    source_of,
    template_like,
    template_of,
)
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.types import DTYPES

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_have_our_names(dtype):
    native = getattr(torch, dtype)
    x = torch.ones(3).to(native)

    template = template_of(x)
    assert template[:3] == ((3,), dtype, x.element_size())
    same = move(x)
    assert type(same) is torch.Tensor
    assert same.dtype is native
    assert same.float().tolist() == [1, 1, 1] if not dtype.startswith("complex") else True


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3)])
def test_shapes(shape):
    x = torch.full(shape, 2.5)

    same = move(x)
    assert torch.equal(same, x)
    assert same.data_ptr() != x.data_ptr() or x.numel() == 0
    assert move(x, shape=(2, 3)).shape == (2, 3) if x.numel() else True


def test_nothing_is_copied_without_need():
    x, out = torch.arange(6.0), torch.empty(2, 3)

    arguments = prepare(x, out)
    assert arguments.source.address == x.data_ptr()
    assert arguments.destination.address == out.data_ptr()
    assert arguments.lasting is out
    assert prepare(x, x).destination.address == x.data_ptr()
    assert move(x, out) is out
    assert out.flatten().tolist() == x.tolist()


def test_views_are_packed_and_filled():
    x, out = torch.arange(6.0).reshape(2, 3).T, torch.zeros(4, 6)

    assert source_of(x).buffer.owner.is_contiguous()
    assert torch.equal(move(x), x)
    assert move(x, out[::2, ::2]).stride() == (12, 2)
    assert out[::2, ::2].flatten().tolist() == x.flatten().tolist()
    assert out.sum() == x.sum()
    assert torch.equal(move(x, x), x)


def test_overlap():
    whole = torch.zeros(8)

    with pytest.raises(ArgumentError, match="out overlaps x"):
        prepare(whole[:4], whole[2:6])
    with pytest.raises(ArgumentError, match="share their memory"):
        prepare(whole[:4], torch.zeros(1).expand(4))


def test_autograd_does_not_see_collectives():
    x = torch.ones(3, requires_grad=True)

    result = move(x)
    assert not result.requires_grad
    assert move(x[:2] * 2).tolist() == [2, 2]
    parameter = torch.nn.Parameter(torch.ones(3))
    assert type(move(parameter)) is torch.Tensor


def test_an_out_that_requires_grad_is_written_as_pytorch_s_own_operations_would():
    x, out = torch.ones(3), torch.zeros(3, requires_grad=True)

    with pytest.raises(ArgumentError, match=r"out requires grad.*torch.no_grad"):
        prepare(x, out)
    with torch.no_grad():
        assert move(x, out) is out
    assert out.tolist() == [1, 1, 1]
    assert move(x * 2, out.detach()).tolist() == [2, 2, 2]


@pytest.mark.parametrize("step", [1, 2])
def test_autograd_hears_that_out_changed(step):
    weight = torch.ones(3, requires_grad=True)
    out = torch.ones(3 * step)[::step]
    product = (weight * out).sum()

    move(torch.full((3,), 5.0), out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("step", [1, 2])
def test_another_thread_may_finish(step):
    """As that of asynchronous calls does: it has a grad mode and inference mode of its own."""
    with torch.inference_mode():
        inferred = torch.zeros(3 * step)[::step]
    leaf = torch.zeros(3 * step, requires_grad=True)
    with torch.no_grad():
        outs = [inferred, leaf[::step] if step > 1 else leaf]
        calls = [prepare(torch.ones(3), out) for out in outs]
    finished: list = []
    thread = threading.Thread(target=lambda: finished.extend(call.finish() for call in calls))
    thread.start()
    thread.join(timeout=30)

    assert len(finished) == len(calls)
    assert all(one is other for one, other in zip(finished, outs, strict=True))


def nested():
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


def freed(start=0):
    x = torch.ones(8)
    part = x[start:]
    x.untyped_storage().resize_(0)
    return part


REFUSED = {
    "freed": (freed, "x has no memory: its storage was freed"),
    "freed part": (lambda: freed(3), "x has no memory: its storage was freed"),
    "uninitialized": (torch.nn.parameter.UninitializedParameter, "run the module once first"),
    "sparse": (lambda: torch.eye(2).to_sparse(), r"layout torch.sparse_coo.*x.to_dense\(\)"),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), "layout torch.sparse_csr"),
    "meta": (lambda: torch.ones(2, device="meta"), "meta device"),
    "conjugate": (lambda: torch.ones(2, dtype=torch.complex64).conj(), "resolve_conj"),
    "negated": (lambda: torch.ones(2, dtype=torch.complex64).conj().imag, "resolve_neg"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8),
        "dequantize",
    ),
    "nested": (nested, r"nested|wraps"),
    "fake": (fake, "FakeTensor, which wraps other tensors"),
    "dtype": (lambda: torch.float32, "x must be an array"),
    "module": (lambda: torch.nn.Linear(1, 1), "x must be an array"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PyTorch, when it makes some of these
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    make, message = REFUSED[name]

    with pytest.raises(ArgumentTypeError, match=message):
        prepare(make())


def test_refused_inside_a_transform():
    def call(x):
        with pytest.raises(ArgumentTypeError, match="no memory of its own"):
            prepare(x)
        return x

    torch.vmap(call)(torch.ones(2, 3))


@pytest.mark.parametrize("step", [1, 2])
def test_refused_where_tensors_have_no_memory(step):
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, out = torch.ones(6)[::step], torch.ones(6 // step)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(ArgumentTypeError, match="makes tensors without memory here"),
    ):
        prepare(x, out if step > 1 else None)


def test_refused_inside_functionalize():
    def call(x):
        with pytest.raises(ArgumentTypeError, match="x has no memory"):
            prepare(x)
        return x.clone()

    torch.func.functionalize(call)(torch.ones(3))


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (np.zeros(3, np.float32), "x's library, a PyTorch tensor; got numpy.ndarray"),
        (torch.zeros(3, dtype=torch.float64), "out has dtype float64, but x has float32"),
    ],
)
def test_refused_out(out, message):
    with pytest.raises(ArgumentTypeError, match=message):
        prepare(torch.zeros(3), out)
    with pytest.raises(ArgumentTypeError, match=r"x's library, a NumPy array; got torch.Tensor"):
        prepare(np.zeros(3), torch.zeros(3))


def test_described():
    like = torch.zeros(2, dtype=torch.int8)
    for dtype, name in [(torch.bfloat16, "bfloat16"), ("float8_e5m2", "float8_e5m2")]:
        assert template_like((3,), dtype, like)[:2] == ((3,), name)
    assert template_like((3,), np.dtype("int16"), like).dtype == "int16"
    template = template_like((3,), torch.bfloat16)
    made = destination_of(template, (3,)).finish()
    assert (type(made), made.dtype) == (torch.Tensor, torch.bfloat16)
    with pytest.raises(ArgumentTypeError, match="is not known to PyTorch"):
        template_like((3,), "float128", like)


def test_sequences():
    assert is_sequence_of_arrays([torch.ones(2), torch.ones(3)])
    assert not is_sequence_of_arrays(torch.ones(2).shape)


@pytest.mark.parametrize(("hip", "name"), [(None, "cuda:1"), ("6.2", "rocm:1")])
def test_gpu_devices_are_known_with_their_stream(monkeypatch, hip, name):
    from gpucoll.arrays import torch_tensors

    streams = {"cuda:1": SimpleNamespace(cuda_stream=4711)}
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[str(device)])

    assert torch_tensors._place(torch.device("cuda:1")) == (name, 4711)
    assert torch_tensors._place(torch.device("mtia:0")) == ("mtia:0", 0)


def test_intel_gpus(monkeypatch):
    """Without one: no tensor can be made on `xpu` here, but its device and stream are known."""
    from gpucoll.arrays import torch_tensors

    stream = SimpleNamespace(sycl_queue=0x1234)
    monkeypatch.setattr(torch.xpu, "current_stream", lambda device: stream)
    device = torch.device("xpu:1")
    assert torch_tensors._place(device) == ("sycl:1", 0x1234)
    template = torch_tensors.template_of_dtype("float32")
    template = template._replace(native=(torch.float32, device))
    assert torch_tensors.current_stream_of(template)() == 0x1234
