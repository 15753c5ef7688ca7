"""`DistributedOptimizer` on ranks beside one process that has all data; prints what passed."""

import itertools
import re
import warnings

import horovod.torch as hvd
import torch
from torch import nn

RANK, SIZE = 0, 1
STEPS, ROWS = 3, 4


def raises(kind, text, function, *args, **named):
    found = None
    try:
        function(*args, **named)
    except kind as error:
        found = str(error)
    assert found is not None, f"no {kind.__name__}"
    assert re.search(text, found), found


def network():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 1)).double()


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SIZE * ROWS, 6, generator=generator, dtype=torch.float64)


def own(x):
    return x[RANK * ROWS : (RANK + 1) * ROWS]


def trained_alone(kind, passes=1, **options):
    """Return the parameters of one process that has the data of all ranks."""
    model = network()
    optimizer = kind(model.parameters(), **options)
    for step in range(STEPS):
        for i in range(passes):
            model(data(step * passes + i)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def trained(kind, passes=1, options=(), model=None, **distributed):
    """Return the parameters after training on the ranks."""
    model = model or network()
    optimizer = kind(model.parameters(), **dict(options))
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), backward_passes_per_step=passes, **distributed
    )
    for step in range(STEPS):
        for i in range(passes):
            model(own(data(step * passes + i))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def assert_same(got, expected, tolerance=1e-10):
    for x, y in zip(got, expected, strict=True):
        assert (x - y).abs().max() < tolerance, (x, y)


def options_give_what_one_process_gets():
    for kind, options in (
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 0.01}),
    ):
        expected = trained_alone(kind, **options)
        assert_same(trained(kind, options=options), expected)
        assert_same(trained(kind, options=options, gradient_predivide_factor=2.0), expected)
        for groups in (1, 2, 4, 50):
            assert_same(trained(kind, options=options, groups=groups), expected)
        model = network()
        some = list(model.parameters())
        groups = [[some[0], some[3]], [some[1]]]
        assert_same(trained(kind, options=options, model=model, groups=groups), expected)
        half = trained(kind, options=options, compression=hvd.Compression.fp16)
        assert_same(half, expected, 1e-3)
        total = trained(kind, options={**options, "lr": 0.0}, op=hvd.Sum)
        assert_same(total, network().parameters())
        expected = trained_alone(kind, passes=2, **options)
        for groups in (None, 2):
            assert_same(trained(kind, passes=2, options=options, groups=groups), expected)


def ranks_have_equal_parameters():
    for parameter in trained(torch.optim.SGD, options={"lr": 0.1}):
        every = hvd.allgather(parameter.detach()[None])
        assert (every == every[0]).all()


def gradients_that_a_rank_lacks():
    for groups in (None, 1):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), groups=groups)
        x = own(data(0))
        (model(x) if RANK else model[0](x)).sum().backward()
        optimizer.step()
        every = hvd.allgather(model[3].weight.detach())
        assert (every == every[0]).all()
        assert model[3].weight.grad.abs().sum() > 0


def a_step_after_synchronize():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    model(own(data(0))).square().mean().backward()
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    clipped = [p.grad.clone() for p in model.parameters()]
    before = [p.detach().clone() for p in model.parameters()]
    with optimizer.skip_synchronize():
        optimizer.step()
    for p, start, gradient in zip(model.parameters(), before, clipped, strict=True):
        assert torch.allclose(p, start - 0.1 * gradient)
    optimizer.zero_grad()
    model(own(data(0))).square().mean().backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.step()
    assert [str(each.message)[:31] for each in told] == ["optimizer.step() called without"]


def hooks_and_schedules():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(2):
        model(own(data(0))).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=False)
    assert calls == ["after"] * 2
    assert abs(optimizer.param_groups[0]["lr"] - 0.001) < 1e-9
    assert type(optimizer).__name__ == "SGD"
    assert isinstance(optimizer, torch.optim.SGD)
    other = torch.optim.SGD(network().parameters(), lr=0.5)
    hvd.DistributedOptimizer(other).load_state_dict(optimizer.state_dict())


def gradients_that_are_not_contiguous():
    torch.manual_seed(3)
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    x = torch.full((1, 3, 8, 8), RANK + 1.0).to(memory_format=torch.channels_last)
    model(x).sum().backward()
    assert not model.weight.grad.is_contiguous()
    optimizer.synchronize()
    expected = torch.full_like(model.weight, 36 * (SIZE + 1) / 2)
    assert torch.allclose(model.weight.grad, expected)


def misuse():
    model = network()

    def distributed(named=None, **options):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return hvd.DistributedOptimizer(optimizer, named, **options)

    named = list(model.named_parameters())
    raises(ValueError, "must be > 0", distributed, backward_passes_per_step=0)
    raises(ValueError, "with op != Average", distributed, gradient_predivide_factor=2, op=hvd.Sum)
    raises(ValueError, "sequence of tuples", distributed, model.parameters())
    raises(ValueError, "duplicates: 0.weight", distributed, [*named, named[0]])
    raises(ValueError, "were not named", distributed, named[1:])
    raises(ValueError, "non-negative integer", distributed, groups=-1)
    raises(ValueError, "consist of torch.Tensor", distributed, groups=[["0.weight"]])
    raises(ValueError, "only appear once", distributed, groups=[[named[0][1]], [named[0][1]]])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        distributed(num_groups=2)
    assert "num_groups" in str(told[0].message)
    model = network()
    optimizer = distributed()
    loss = model(own(data(0))).square().mean()
    loss.backward(retain_graph=True)
    raises(AssertionError, "zero_grad\\(\\) was called after", optimizer.zero_grad)
    raises(AssertionError, "more than backward_passes_per_step", loss.backward)
    optimizer.synchronize()
    hvd.barrier()


def sparse_gradients():
    for as_dense, passes in itertools.product((False, True), (1, 2)):
        torch.manual_seed(2)
        model = nn.Embedding(10, 3, sparse=True)
        start = model.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(
            optimizer, sparse_as_dense=as_dense, backward_passes_per_step=passes
        )
        for _ in range(passes):
            model(torch.tensor([0, RANK + 1])).sum().backward()
        optimizer.step()
        change = torch.zeros(10, 3)
        change[0] = passes
        change[1 : SIZE + 1] = passes / SIZE
        assert torch.allclose(model.weight.detach(), start - change), (as_dense, passes)


def adasum_combines_changes():
    if SIZE == 3:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
        raises(NotImplementedError, "non-power of 2", model(data(0)).sum().backward)
        return
    changes = []
    for rank in (0, 1):
        model = network()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(data(0)[rank * ROWS : (rank + 1) * ROWS]).square().mean().backward()
        optimizer.step()
        changes.append(
            [p.detach() - start for p, start in zip(model.parameters(), before, strict=True)]
        )
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Adasum)
    raises(AssertionError, "not supported when using Adasum", optimizer.skip_synchronize)
    model(own(data(0))).square().mean().backward()
    optimizer.step()
    for p, start, a, b in zip(model.parameters(), before, *changes, strict=True):
        dot = (a * b).sum()
        expected = (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b
        assert torch.allclose(p.detach(), start + expected)


def process_sets_leave_others_alone():
    some = hvd.add_process_set([0])
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), process_set=some)
    model(own(data(0))).square().mean().backward()
    gradient = model[0].weight.grad.clone()
    optimizer.step()
    assert torch.equal(gradient, model[0].weight.grad)
    hvd.barrier()
    hvd.remove_process_set(some)


def a_state_comes_from_the_root():
    model = network()
    options = {"lr": 0.01 * (RANK + 1), "weight_decay": 0.5}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    if RANK == 0:
        for step in range(2):
            optimizer.zero_grad()
            model(data(step)).sum().backward()
            optimizer.step()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    if RANK == 0:
        optimizer.state.update({p: {"step": torch.tensor(2.0), "exp_avg": torch.ones_like(p),
                                    "exp_avg_sq": torch.ones_like(p), "kept": (1, "two")}
                                for p in model.parameters()})  # fmt: skip
    hvd.broadcast_parameters(model.state_dict(), 0)
    parameters = [p.detach().clone() for p in model.parameters()]
    hvd.broadcast_optimizer_state(optimizer, 0)
    for p, before in zip(model.parameters(), parameters, strict=True):
        assert torch.equal(p, before)
        state = optimizer.state[p]
        assert state["kept"] == (1, "two")
        assert state["step"].item() == 2.0
        assert torch.equal(state["exp_avg"], torch.ones_like(p))
    assert optimizer.param_groups[0]["lr"] == 0.01
    raises(
        ValueError, "LBFGS", hvd.broadcast_optimizer_state, torch.optim.LBFGS([parameters[0]]), 0
    )


def parameters_that_are_not_contiguous():
    x = torch.full((3, 4), float(RANK)).t()
    hvd.broadcast_parameters([("x", x)], SIZE - 1)
    assert (x == SIZE - 1).all()
    hvd.broadcast_parameters([torch.ones(2)], 0)


def main():
    global RANK, SIZE
    hvd.init(process_sets="dynamic")
    RANK, SIZE = hvd.rank(), hvd.size()
    checks = [options_give_what_one_process_gets, ranks_have_equal_parameters]
    checks += [gradients_that_a_rank_lacks, a_step_after_synchronize, misuse, sparse_gradients]
    checks += [hooks_and_schedules, gradients_that_are_not_contiguous]
    checks += [adasum_combines_changes, process_sets_leave_others_alone]
    checks += [a_state_comes_from_the_root, parameters_that_are_not_contiguous]
    for check in checks:
        check()
        print("passed", check.__name__, flush=True)
    hvd.shutdown()


main()
