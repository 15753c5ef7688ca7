"""What PyTorch's tensors have and other arrays lack: on the host, and on a real GPU."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.calls.gpu.test_repeated_calls import warm

from gpucoll import config
from gpucoll.errors import ArgumentError, ArgumentTypeError

LIBRARY = "torch"
VARIABLES: dict[str, dict[str, str]] = {"host": {}, "gpu": {}}

pytest.importorskip("torch", reason="PyTorch is not installed")


def missing(torch):
    return "" if torch.cuda.is_available() else "PyTorch sees no GPU"


def place_of(comm, torch):
    """Return where this rank's tensors are to lie: on a GPU where it may use one."""
    return "cpu" if config.cpu_only() else "cuda"


def reuse_memory(comm, torch):
    """Inputs die at once, and what is made next gets their memory while the calls are under way."""
    place, size, count = place_of(comm, torch), comm.world_size, 1 << 18
    comm.all_reduce(torch.ones(3, device=place))
    works = []
    for step in range(30):
        x = torch.full((count,), float(step), device=place)
        works.append(comm.all_reduce(x, async_op=True))
        del x
        torch.full((count,), -1.0, device=place)
    plain = [comm.all_reduce(torch.full((count,), float(step), device=place)) for step in range(30)]
    for step in range(30):
        for result in (works[step].wait(), plain[step]):
            assert result.min().item() == result.max().item() == step * size
    comm.check()


def test_memory_that_is_used_again(host_or_gpu):
    host_or_gpu(reuse_memory)


def use_every_layout(comm, torch):
    place, size = place_of(comm, torch), comm.world_size
    images = torch.arange(120.0, device=place).reshape(2, 3, 4, 5)
    last = images.to(memory_format=torch.channels_last)
    assert not last.is_contiguous()
    assert torch.equal(comm.all_reduce(last), images * size)
    out = torch.zeros_like(last)
    assert comm.all_reduce(last, out=out) is out
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(out, images * size)
    assert comm.all_reduce(last, out=last) is last
    assert torch.equal(last, images * size)
    matrix = torch.arange(6.0, device=place).reshape(2, 3)
    assert torch.equal(comm.all_reduce(matrix.T), matrix.T * size)
    assert comm.all_gather(torch.ones(0, 3, device=place)).shape == (0, 3)
    assert comm.all_reduce(torch.tensor(2.0, device=place)).item() == 2 * size
    spread = torch.zeros(1, device=place).expand(4)
    assert torch.equal(comm.all_reduce(spread + 1), torch.full((4,), float(size), device=place))
    with pytest.raises(ArgumentError, match="share their memory"):
        comm.all_reduce(torch.ones(4, device=place), out=spread)
    comm.check()


def test_layouts(host_or_gpu):
    host_or_gpu(use_every_layout)


def use_every_kind(comm, torch):
    """Parameters, views that are lazy, freed storage, other dtypes than NumPy's."""
    place, size = place_of(comm, torch), comm.world_size
    weight = torch.nn.Parameter(torch.ones(5, device=place))
    total = comm.all_reduce(weight)
    assert type(total) is torch.Tensor
    assert not total.requires_grad
    with pytest.raises(ArgumentError, match=r"out requires grad.*torch.no_grad"):
        comm.all_reduce(total, out=weight)
    for _ in range(3):
        with torch.no_grad():
            assert comm.all_reduce(weight, out=weight) is weight
    assert (weight == float(size) ** 3).all()
    turned = torch.full((4,), 1 + 2j, device=place).conj()
    for lazy, remedy in ((turned, "resolve_conj"), (turned.imag, "resolve_neg")):
        with pytest.raises(ArgumentTypeError, match=remedy):
            comm.all_reduce(lazy)
        assert torch.equal(comm.all_reduce(lazy.resolve_conj().resolve_neg()), lazy * size)
    empty = torch.ones(4, device=place)
    empty.untyped_storage().resize_(0)
    with pytest.raises(ArgumentTypeError, match="its storage was freed"):
        comm.all_reduce(empty)
    for name in ("bfloat16", "float16", "uint16", "float8_e4m3fn"):
        values = torch.ones(8, device=place).to(getattr(torch, name))
        gathered = comm.all_gather(values)
        assert gathered.dtype is values.dtype
        assert (gathered.float() == 1).all()
    with torch.inference_mode():
        inferred = torch.ones(3, device=place)
        comm.all_reduce(inferred, out=inferred)
    assert inferred.tolist() == [float(size)] * 3
    comm.check()


def test_kinds_of_tensors(host_or_gpu):
    host_or_gpu(use_every_kind)


def autograd_hears(comm, torch):
    place = place_of(comm, torch)
    weight = torch.ones(3, device=place, requires_grad=True)
    out = torch.ones(3, device=place)
    for _ in range(3):
        product = (weight * out).sum()
        comm.all_reduce(torch.ones(3, device=place), out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
    comm.check()


def test_autograd_hears_that_out_changed(host_or_gpu):
    host_or_gpu(autograd_hears)


# --- tensors of the host as if they lay on the double's GPU ---------------------------------------


def as_on_a_gpu(rank):
    """Make calls in every way, three times each; PyTorch's own work waits for nobody's stream."""
    torch: Any = importlib.import_module("torch")
    library: Any = importlib.import_module("gpucoll.arrays.torch_tensors")

    kept = []

    def full(value, count):
        made = rank.kit.bytes_of(np.full(count, value, np.float32).view(np.uint8))
        kept.append(made)
        return torch.from_numpy(made.host.view(np.float32))

    def empty(shape, *, dtype, device):
        return full(-1, int(np.prod(shape))).reshape(shape)

    with pytest.MonkeyPatch.context() as patch, rank.init() as comm:
        patch.setattr(torch, "empty", empty)
        patch.setattr(library, "_place", lambda device: (f"cuda:{rank.rank}", 0))
        patch.setattr(library, "current_stream_of", lambda template: lambda: 0)
        counted, size = warm(comm, rank.kit), comm.world_size
        shortly = []
        for step in range(3):
            x, y, out, more, last = (full(value, 6) for value in (step, step, -1, -1, -1))
            gathered, wide = full(0, 6 * size), full(0, 12)
            calls = [
                partial(comm.all_reduce, x, out=out),
                partial(comm.all_reduce, y, out=y),
                partial(comm.all_reduce, x),
                partial(comm.all_reduce, x, out=more, async_op=True),
                partial(comm.all_reduce, x, async_op=True),
                partial(comm.all_reduce, x, out=wide[::2], async_op=True),
                partial(comm.broadcast, [x], root=1),
            ]
            for place, call in enumerate(calls):
                comm.check()  # so that there are events
                counted.take()
                result = call()
                shortly += [place] * counted.take()
                comm.check()  # PyTorch's work on the host comes behind nothing
                result = result.wait() if hasattr(result, "wait") else result
                result = result[0] if isinstance(result, list) else result
                assert result.tolist() == [float(step * (size if place < 6 else 1))] * 6
            assert wide.tolist() == [float(step * size), 0.0] * 6
            with comm.group():
                comm.all_reduce(x, out=last)
            comm.all_gather(x, out=gathered)
            comm.check()
            assert last.tolist() == [float(step * size)] * 6
            assert gathered.tolist() == [float(step)] * (6 * size)
        return shortly


def test_host_tensors_through_the_double(gpus):
    if pytest.importorskip("torch").version.cuda:
        pytest.skip("PyTorch for CUDA and the double would take each other's libnccl for their own")
    shortly = [4, *range(5), *range(5)]  # from the second time on, waited for at once or later
    assert gpus.call_ranks(2, as_on_a_gpu) == [shortly] * 2


# --- on a GPU alone -------------------------------------------------------------------------------


def use_streams(comm, torch):
    """Work before the call and after it, on streams that wait for nobody."""
    count = 1 << 22
    comm.all_reduce(torch.ones(3, device="cuda"))
    streams = [torch.cuda.Stream() for _ in range(3)]
    for step in range(30):
        with torch.cuda.stream(streams[step % 3]):
            x = torch.zeros(count, device="cuda")
            for _ in range(5):
                x += step
            total = comm.all_reduce(x)
            later = comm.all_reduce(x, async_op=step % 2 == 0)
            if step % 2 == 0:
                later = later.wait()
            both = total + later
            assert both.min().item() == both.max().item() == 10.0 * step
    given = torch.cuda.Stream()
    x = torch.full((count,), 3.0, device="cuda")
    out = torch.zeros(count, device="cuda")
    given.wait_stream(torch.cuda.current_stream())
    comm.all_reduce(x, out=out, stream=given)
    given.synchronize()
    assert out.min().item() == 3
    external = torch.cuda.ExternalStream(given.cuda_stream)
    comm.all_reduce(x, out=x, stream=external)
    external.synchronize()
    comm.check()


@pytest.mark.gpu
def test_streams(on_gpu):
    on_gpu(use_streams)


def use_memory(comm, torch):
    x = torch.ones(1000, device="cuda")
    comm.all_reduce(x)
    kept = {}
    for name in ("float32", "bfloat16", "float8_e4m3fn", "uint16", "bool", "complex64"):
        made = comm.empty((2, 3), name, like=x)
        assert (made.dtype, tuple(made.shape)) == (getattr(torch, name), (2, 3))
        assert made.device == x.device
        made.copy_(torch.ones(2, 3, device="cuda").to(made.dtype))
        kept[name] = comm.all_gather(made), made[1]
    with comm.register(x):
        assert comm.all_reduce(x, out=x) is x
        comm.check()
    comm.close()
    for gathered, row in kept.values():
        assert (gathered.float() == 1).all() if not gathered.is_complex() else True
        assert np.prod(row.shape) == 3
    torch.cuda.synchronize()
    return x.min().item()


@pytest.mark.gpu
def test_registered_memory(on_gpu):
    assert on_gpu(use_memory) == 1.0


def capture(comm, torch):
    x, out = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
    comm.all_reduce(x, out=out)
    comm.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.all_reduce(x, out=out)
    results = []
    for value in (3.0, 4.0):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        results.append((out.min().item(), out.max().item()))
    graph.reset()
    comm.check()
    results.append(comm.all_reduce(x)[0].item())
    return results


@pytest.mark.gpu
def test_a_captured_graph_can_be_replayed(on_gpu):
    assert on_gpu(capture) == [(3.0, 3.0), (4.0, 4.0), 4.0]
