"""The ops behind functional collectives, every one that this torch has, against Gloo's results."""

from __future__ import annotations

from typing import Any

NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")
ON_TWO = {
    "_c10d_functional": {
        "all_reduce": lambda op, x, g: op(x, "sum", g),
        "all_reduce_": lambda op, x, g: op(x, "max", g),
        "all_reduce_coalesced": lambda op, x, g: op([x, 2 * x], "sum", g),
        "all_reduce_coalesced_": lambda op, x, g: op([x, 2 * x], "min", g),
        "all_gather_into_tensor": lambda op, x, g: op(x, 2, g),
        "all_gather_into_tensor_out": lambda op, x, g: op(x, 2, g, out=empty(8, 3)),
        "all_gather_into_tensor_coalesced": lambda op, x, g: op([x, x[:2] + 0.5], 2, g),
        "reduce_scatter_tensor": lambda op, x, g: op(x, "sum", 2, g),
        "reduce_scatter_tensor_out": lambda op, x, g: op(x, "max", 2, g, out=empty(2, 3)),
        "reduce_scatter_tensor_coalesced": lambda op, x, g: op([x, 2 * x], "sum", 2, g),
        "all_to_all_single": lambda op, x, g: op(x, [2, 2], [2, 2], g),
        "broadcast": lambda op, x, g: op(x, 1, g),
        "broadcast_": lambda op, x, g: op(x, 0, g),
        "isend": lambda op, x, g: [op(x, 1 - here(), 5, g), irecv(1 - here(), 5, g)],
        "irecv": lambda op, x, g: [isend(x, 1 - here(), 6, g), op(empty(4, 3), 1 - here(), 6, g)],
        "batch_p2p_ops": lambda op, x, g: op(
            ["irecv", "isend", "isend", "irecv"],
            [1 - here()] * 4,
            [7, 8, 7, 8],
            [empty(4, 3), x, 2 * x, empty(4, 3)],
            g,
        ),
        "wait_tensor": lambda op, x, _: op(x),
        "_wrap_tensor_autograd": lambda op, x, _: op(x),
    },
    "_c10d_functional_autograd": {
        "all_gather_into_tensor": lambda op, x, g: op(x, 2, g),
        "reduce_scatter_tensor": lambda op, x, g: op(x, "sum", 2, g),
        "all_to_all_single": lambda op, x, g: op(x, [2, 2], [2, 2], g),
    },
}
"""How each op is called with a tensor of 4 x 3 and the group's name, on two ranks."""


def empty(*shape):
    import torch

    return torch.full(shape, -1.0)


def here():
    from torch import distributed as dist

    return dist.get_rank()


def isend(x, rank, tag, group):
    import torch

    return torch.ops._c10d_functional.isend(x, rank, tag, group)


def irecv(rank, tag, group):
    import torch

    return torch.ops._c10d_functional.irecv(empty(4, 3), rank, tag, group)


def in_torch():
    """Return the ops of both namespaces that torch knows."""
    import torch
    from torch.distributed import _functional_collectives  # noqa: F401 - it defines some

    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    return sorted(name for name in names if name.partition("::")[0] in NAMESPACES)


def input_of(rank):
    import torch

    return torch.arange(12.0).reshape(4, 3) + 100 * rank


def call_every_op():
    """Return what each op gave, what gradient it let through, or that it was not tried."""
    import torch
    from torch import distributed as dist

    group = dist.group.WORLD.group_name
    found: dict[str, Any] = {}
    for name in in_torch():
        namespace, _, short = name.partition("::")
        how = ON_TWO[namespace].get(short)
        if how is None:
            found[name] = "not tried: add it to ON_TWO"
            continue
        op = getattr(getattr(torch.ops, namespace), short)
        x = input_of(dist.get_rank())
        x.requires_grad_(namespace.endswith("autograd"))
        try:
            given = how(op, x, group)
            outputs = [given] if isinstance(given, torch.Tensor) else given
            waited = [torch.ops._c10d_functional.wait_tensor(out) for out in outputs]
            found[name] = [out.tolist() for out in waited]
            if x.requires_grad:
                waited[0].pow(2).sum().backward()
                found[name].append(x.grad.tolist())
        except RuntimeError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_every_op_gives_what_gloo_gives(groups):
    found, expected = (groups.call(2, call_every_op, backend=b) for b in ("gpucoll", "gloo"))

    assert found == expected
    assert {name: one for name, one in found[0].items() if not isinstance(one, list)} == {}


def call_on_gloos_group():
    """Return what the two ops that gpucoll has kernels for give on a group that is not its own."""
    import torch
    from torch import distributed as dist

    group = dist.new_group(backend="gloo")
    ops, x, peer = torch.ops._c10d_functional, input_of(dist.get_rank()), 1 - dist.get_rank()
    results = [ops.all_gather_into_tensor_out(x, 2, group.group_name, out=empty(8, 3))]
    results += ops.batch_p2p_ops(
        ["isend", "irecv"], [peer, peer], [0, 0], [x, empty(4, 3)], group.group_name
    )
    results = [ops.wait_tensor(out).tolist() for out in results]
    dist.destroy_process_group(group)
    return results


def test_groups_of_other_backends_keep_their_kernels(groups):
    both = [input_of(rank).tolist() for rank in range(2)]

    for rank, results in enumerate(groups.call(2, call_on_gloos_group)):
        assert results == [both[0] + both[1], [], both[1 - rank]]


def call_often_on_gloos_group(count):
    """Begin calls while Gloo's thread frees the tensors of the one before, which takes the GIL."""
    import torch
    from torch import distributed as dist

    group = dist.new_group(backend="gloo")
    ops, name = torch.ops._c10d_functional, group.group_name
    for number in range(count):
        x = torch.full((1,), float(number))
        out = ops.wait_tensor(ops.all_gather_into_tensor_out(x, 2, name, out=empty(2)))
        assert out.tolist() == [number, number]
    dist.destroy_process_group(group)


def test_kernels_of_other_backends_run_without_the_gil(groups):
    groups.call(2, call_often_on_gloos_group, 2000)


def compile_bucketed():
    """Compile a function of several all_gathers, which a pass of Inductor's makes one.

    The pass is what ``torch._inductor.config.bucket_all_gathers_fx = "all"`` adds. What is left is
    run as it is: Inductor's own compilation would take half a minute.
    """
    import torch
    from torch import distributed as dist
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.fx_passes import bucketing
    from torch.distributed import _functional_collectives as functional

    targets: list[str] = []

    def bucketed(graph, _):
        bucketing.bucket_all_gather(graph)
        graph.recompile()
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    def gather(xs):
        gathered = [functional.all_gather_tensor(x, 0, dist.group.WORLD) for x in xs]
        return [functional.wait_tensor(x) for x in gathered]

    x = input_of(dist.get_rank())
    compiled = torch.compile(gather, backend=aot_autograd(fw_compiler=bucketed))
    results = [one.tolist() for one in compiled([x, x[:2] + 0.5])]
    return results, [name for name in targets if "all_gather" in name]


def test_bucketed_all_gathers_of_inductor(groups):
    both = [input_of(rank) for rank in range(2)]
    halves = [x[:2] + 0.5 for x in both]
    expected = [[row.tolist() for x in xs for row in x] for xs in (both, halves)]

    for results, gathers in groups.call(2, compile_bucketed):
        assert results == expected
        assert gathers == ["_c10d_functional.all_gather_into_tensor_out.default"]
