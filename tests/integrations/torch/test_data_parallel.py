"""DistributedDataParallel over the backend: gradients, hooks, joins, data loaders."""

from __future__ import annotations

import pytest


def network(seed=0):
    import torch

    torch.manual_seed(seed)
    layers = [torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 3)]
    return torch.nn.Sequential(*layers)


def batch(rank):
    import torch

    torch.manual_seed(100 + rank)
    return torch.randn(8, 20)


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def train(hook=None, steps=3, **options):
    """Return the parameters after some steps, as lists."""
    import torch
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(network(), **options)
    if hook is not None:
        model.register_comm_hook(*hook(dist.group.WORLD))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch(dist.get_rank())).pow(2).mean().backward()
        optimizer.step()
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]


def train_alone(world_size, steps=3):
    """Do the same in one process, on the batches of all ranks."""
    import torch

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        for rank in range(world_size):
            (model(batch(rank)).pow(2).mean() / world_size).backward()
        optimizer.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"bucket_cap_mb": 0.001},
        {"find_unused_parameters": True},
    ],
    ids=str,
)
def test_training_equals_one_process(groups, options):
    """Sums of two terms are rounded once in either order: the same bits up to halving first."""
    import numpy as np

    first, second = groups.call(2, lambda: train(**options))

    assert first == second
    for found, expected in zip(first, train_alone(2), strict=True):
        # 3 steps of sums of 8 x 2 products each, in another order: some 50 roundings of 6e-8.
        values = np.frombuffer(found, np.float32).reshape(expected.shape)
        np.testing.assert_allclose(values, expected, rtol=0, atol=50 * 6e-8)


def test_the_same_bits_as_gloo_with_two_ranks(groups):
    assert groups.call(2, train) == groups.call(2, train, backend="gloo")


def power_sgd(group):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
    return state, powerSGD_hook.powerSGD_hook


def half(group):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return group, default_hooks.fp16_compress_hook


def test_a_hook_that_makes_calls_in_callbacks_and_waits_for_them(groups):
    first, second = groups.call(2, train, power_sgd, 5)  # gloo's may end the process at its end

    assert first == second
    assert first == groups.call(2, train, power_sgd, 5)[0]
    assert first != groups.call(2, train, None, 5)[0]


def test_a_hook_that_compresses(groups):
    first, second = groups.call(2, train, half, 5)

    assert first == second
    assert first == groups.call(2, train, half, 5, backend="gloo")[0]


def hook_that_fails():
    import torch
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(network())

    def hook(state, bucket):
        if dist.get_rank() == 1:
            raise ValueError("the hook of rank 1")
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    try:
        model(batch(0)).sum().backward()
    except Exception as error:
        if dist.get_rank() == 1:
            dist.group.WORLD.abort()
        return type(error).__name__, str(error)
    return torch.get_num_threads()


def test_a_hook_that_raises_ends_the_others(groups):
    (kind, text), (kind_1, text_1) = groups.call(2, hook_that_fails)

    assert (kind_1, text_1) == ("ValueError", "the hook of rank 1")
    assert kind == "RuntimeError"  # through a future of torch's
    assert "AbortedError" in text
    assert "rank 1" in text


def exchange_compressed(compression, steps):
    """Average the same gradients many times; return the mean of all, the last, what is right."""
    import torch
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from gpucoll.integrations.torch import CompressedGradients

    torch.manual_seed(3)
    model = DistributedDataParallel(torch.nn.Linear(300, 30))
    CompressedGradients(compression).register(model)
    x = torch.randn(16, 300, generator=torch.Generator().manual_seed(dist.get_rank()))
    sums, last = torch.zeros(0), torch.zeros(0)
    for _ in range(steps):
        model.zero_grad()
        model(x).pow(2).sum().backward()
        last = torch.cat([one.reshape(-1) for one in gradients(model)])
        sums = sums + last if len(sums) else last
    model.zero_grad()
    with model.no_sync():
        model(x).pow(2).sum().backward()
    exact = torch.cat([one.reshape(-1) for one in gradients(model)])
    dist.all_reduce(exact, dist.ReduceOp.AVG)
    return (sums / steps).numpy(), last.numpy(), exact.numpy()


@pytest.mark.parametrize("compression", ["float16", "bfloat16", "int8_block", "float8_block"])
def test_what_compression_loses_comes_later(groups, compression):
    import numpy as np

    steps = 40
    results = groups.call(2, exchange_compressed, compression, steps)

    for mean, last, exact in results:
        assert (mean == results[0][0]).all()
        once = np.abs(last - exact).max()
        assert once > 0
        # What one step loses is added in the next: over all steps no more than one step's is left.
        assert np.abs(mean - exact).max() <= 3 * once / steps + 1e-5 * np.abs(exact).max()


def compress_elsewhere():
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from gpucoll.integrations.torch import CompressedGradients

    model = DistributedDataParallel(network(), process_group=dist.new_group(backend="gloo"))
    with pytest.raises(TypeError, match="on a process group of backend gpucoll; got Distributed"):
        CompressedGradients("int8_block").register(model)
    with pytest.raises(ValueError, match="int4"):
        CompressedGradients("int4")


def test_compressed_gradients_need_the_backend(groups):
    groups.call(2, compress_elsewhere)


def reduce_compressed(count):
    import torch
    from torch import distributed as dist

    x = torch.linspace(-1, 1, count)
    dist.all_reduce(x)
    exact = 2 * torch.linspace(-1, 1, count)
    return (x - exact).abs().max().item()


def test_large_reductions_compressed_by_option(groups):
    given = {"compression": "int8_block", "compression_from_bytes": 4096}

    assert groups.call(2, reduce_compressed, 1000, options=given) == [0.0, 0.0]
    for error in groups.call(2, reduce_compressed, 1024, options=given):
        assert 0 < error < 4 / 126


def embed():
    import torch
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Embedding(10, 4, sparse=True))
    model(torch.tensor([1, 2, 2]) + dist.get_rank()).sum().backward()
    return next(model.parameters()).grad.to_dense().tolist()


def test_sparse_gradients(groups):
    assert groups.call(2, embed) == [groups.call(2, embed, backend="gloo")[0]] * 2


def join_uneven():
    import torch
    from torch import distributed as dist
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(network())
    count = 0
    with Join([model]):
        for _ in range(2 + 3 * dist.get_rank()):
            model(batch(0)).sum().backward()
            count += 1
    return count, torch.cat([one.reshape(-1) for one in gradients(model)]).sum().item()


def test_join_with_uneven_inputs(groups):
    (first, _), (second, _) = groups.call(2, join_uneven)

    assert (first, second) == (2, 5)


class Numbers:
    """A data set."""

    def __len__(self):
        return 12

    def __getitem__(self, place):
        return place


def load(context):
    import torch
    from torch import distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    data = Numbers()
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(
        data, 2, sampler=sampler, num_workers=2, multiprocessing_context=context, timeout=60
    )
    total = torch.zeros(1)
    for part in loader:
        total += part.sum()
        dist.all_reduce(torch.ones(1))
    dist.all_reduce(total)
    return total.item()


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_data_loaders_with_workers(groups, context):
    assert groups.call(2, load, context) == [66.0, 66.0]
