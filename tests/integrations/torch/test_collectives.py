"""Every collective of torch.distributed against what one process computes of all ranks' inputs.

A case is run for many dtypes, shapes and layouts inside one process group; what was wrong comes
back. Inputs are small integers, so that sums are exact; outputs begin as something else.
"""

from __future__ import annotations

import pytest

DTYPES = (
    *("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "bool"),
)
MOVED_ONLY = ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
SHAPES = ((), (0,), (1,), (2, 3), (5, 1, 3), (20_000,))


def values(rank, shape, dtype):
    """Return a rank's input: 1 to 3 (bool: both), the same every time."""
    import torch

    kind = getattr(torch, dtype)
    count = torch.Size(shape).numel()
    numbers = (torch.arange(count) * 7 + rank) % 3 + 1
    if dtype == "bool":
        numbers = (numbers + rank) % 2
    if kind.is_complex:
        numbers = torch.complex(numbers.float(), numbers.float() + 1)
    return numbers.reshape(shape).to(kind)


def poisoned(like, shape=None):
    import torch

    out = torch.empty(like.shape if shape is None else shape, dtype=like.dtype)
    out.view(torch.uint8).fill_(0x55) if out.dim() else None
    return out


def exact(x):
    """Return a tensor in which all its values are exact, and may be computed with."""
    import torch

    if x.dtype == torch.complex32:
        return x.to(torch.complex64)
    return x if x.is_complex() else x.double()


def same(found, expected):
    import torch

    return torch.equal(exact(found), exact(expected.to(found.dtype)))


def layouts(x):
    """Return tensors of these values, laid out in several ways."""
    import torch

    yield "contiguous", x.clone()
    if x.dim() >= 1 and x.numel():
        wide = torch.stack([x, x], -1)
        yield "strided", wide[..., 0]
    if x.dim() >= 2:
        yield "transposed", x.transpose(0, -1).contiguous().transpose(0, -1)


def each(dtypes=DTYPES, shapes=SHAPES):
    for dtype in dtypes:
        for shape in shapes if dtype in ("float32", "int64", "bfloat16") else ((), (2, 3)):
            yield dtype, shape


class Found:
    """What was wrong, by case."""

    def __init__(self):
        self.wrong = []

    def compare(self, case, found, expected):
        try:
            if not same(found, expected):
                self.wrong.append((case, found.tolist()[:4], expected.tolist()[:4]))
        except Exception as error:
            self.wrong.append((case, repr(error)))


def world():
    from torch import distributed as dist

    return dist.get_rank(), dist.get_world_size()


def reduce_all(is_async):
    from torch import distributed as dist

    rank, size = world()
    found = Found()
    for dtype, shape in each():
        inputs = [values(other, shape, dtype) for other in range(size)]
        total = sum(exact(x) for x in inputs)
        total = total.clamp(max=1) if dtype == "bool" else total
        for layout, x in layouts(inputs[rank]):
            work = dist.all_reduce(x, async_op=is_async)
            if is_async:
                work.wait()
            found.compare(("all_reduce", dtype, shape, layout), x, total)
            root = size - 1
            y = inputs[rank].clone()
            work = dist.reduce(y, root, async_op=is_async)
            if is_async:
                work.wait()
            found.compare(("reduce", dtype, shape), y, total if rank == root else inputs[rank])
    listed = [values(rank, (count,), "float32") for count in (1, 0, 300)]
    expected = [
        sum(values(other, (count,), "float32") for other in range(size)) for count in (1, 0, 300)
    ]
    with dist._coalescing_manager():
        for x in listed:
            dist.all_reduce(x)
    for x, total in zip(listed, expected, strict=True):
        found.compare(("coalesced", len(x)), x, total)
    return found.wrong


def reduce_by_every_op():
    import torch
    from torch import distributed as dist

    rank, size = world()
    found = Found()
    both = torch.maximum, torch.minimum, torch.mul, torch.bitwise_and, torch.bitwise_or
    functions = dict(zip(("MAX", "MIN", "PRODUCT", "BAND", "BOR"), both, strict=True))
    functions["BXOR"] = torch.bitwise_xor
    for dtype in ("int32", "uint8", "float32", "float16"):
        inputs = [values(other, (3, 5), dtype) for other in range(size)]
        for name, function in functions.items():
            if name.startswith("B") and dtype.startswith("float"):
                continue
            expected = inputs[0]
            for other in inputs[1:]:
                expected = function(expected, other)
            x = inputs[rank].clone()
            dist.all_reduce(x, getattr(dist.ReduceOp, name))
            found.compare((name, dtype), x, expected)
        total = sum(exact(x) for x in inputs)
        x = inputs[rank].clone()
        dist.all_reduce(x, dist.ReduceOp.AVG)
        mean = total / size if dtype.startswith("float") else (total / size).trunc()
        found.compare(("AVG", dtype), x, mean)
        x = inputs[rank].clone()
        dist.all_reduce(x, dist._make_nccl_premul_sum(2.0))
        found.compare(("PREMUL_SUM", dtype), x, 2 * total)
        out = poisoned(x, (5,))
        blocks = [values(rank + block, (5,), dtype) for block in range(size)]
        dist.reduce_scatter(out, blocks, dist.ReduceOp.MAX)
        expected = values(rank, (5,), dtype)
        for other in range(1, size):
            expected = torch.maximum(expected, values(other + rank, (5,), dtype))
        found.compare(("reduce_scatter", dtype), out, expected)
    return found.wrong


def move(is_async):
    from torch import distributed as dist

    rank, size = world()
    found = Found()

    def run(call, *args, **given):
        work = call(*args, async_op=is_async, **given)
        if is_async:
            work.wait()

    for dtype, shape in each((*DTYPES, *MOVED_ONLY)):
        inputs = [values(other, shape, dtype) for other in range(size)]
        mine, root = inputs[rank], size - 1
        for layout, x in layouts(mine):
            run(dist.broadcast, x, root)
            found.compare(("broadcast", dtype, shape, layout), x, inputs[root])
            case = dtype, shape, layout
            mine = next(t for n, t in layouts(inputs[rank]) if n == layout)
            outs = [next(t for n, t in layouts(poisoned(mine)) if n == layout) for _ in inputs]
            run(dist.all_gather, outs, mine)
            for other, out in enumerate(outs):
                found.compare(("all_gather", *case), out, inputs[other])
            outs = [next(t for n, t in layouts(poisoned(mine)) if n == layout) for _ in inputs]
            run(dist.gather, mine, outs if rank == root else None, root)
            for other, out in enumerate(outs if rank == root else ()):
                found.compare(("gather", *case), out, inputs[other])
            out = next(t for n, t in layouts(poisoned(mine)) if n == layout)
            given = [next(t for n, t in layouts(x) if n == layout) for x in inputs]
            run(dist.scatter, out, given if rank == root else None, root)
            found.compare(("scatter", *case), out, inputs[rank])
            outs = [next(t for n, t in layouts(poisoned(mine)) if n == layout) for _ in inputs]
            run(dist.all_to_all, outs, [mine] * size)
            for other, out in enumerate(outs):
                found.compare(("all_to_all", *case), out, inputs[other])
    return found.wrong


def move_whole(is_async):
    import torch
    from torch import distributed as dist

    rank, size = world()
    found = Found()
    for dtype, shape in each(DTYPES, ((3,), (2, 3), (0, 2), (7, 1000))):
        shape = shape or (3,)
        inputs = [values(other, shape, dtype) for other in range(size)]
        whole = torch.cat(inputs)
        for out_shape in ((size * shape[0], *shape[1:]), (size, *shape), (whole.numel(),)):
            out = poisoned(inputs[rank], out_shape)
            work = dist.all_gather_into_tensor(out, inputs[rank], async_op=is_async)
            if is_async:
                work.wait()
            found.compare(
                ("all_gather_into_tensor", dtype, shape), out.reshape(-1), whole.reshape(-1)
            )
        totals = sum(exact(torch.cat([x] * size)) for x in inputs)
        totals = totals.clamp(max=1) if dtype == "bool" else totals
        out = poisoned(inputs[rank])
        work = dist.reduce_scatter_tensor(out, torch.cat([inputs[rank]] * size), async_op=is_async)
        if is_async:
            work.wait()
        part = totals[rank * shape[0] : (rank + 1) * shape[0]]
        found.compare(("reduce_scatter_tensor", dtype, shape), out, part)
        out = poisoned(inputs[rank], (size * shape[0], *shape[1:]))
        sent = torch.cat([values(rank + other, shape, dtype) for other in range(size)])
        expected = torch.cat([values(other + rank, shape, dtype) for other in range(size)])
        work = dist.all_to_all_single(out, sent, async_op=is_async)
        if is_async:
            work.wait()
        found.compare(("all_to_all_single", dtype, shape), out, expected)
    return found.wrong


def move_unevenly():
    import torch
    from torch import distributed as dist

    rank, size = world()
    found = Found()
    for scale in (1, 100_000):
        rows = [scale * (other % 3) for other in range(size)]
        inputs = [values(other, (rows[other], 2), "float32") for other in range(size)]
        outs = [poisoned(x) for x in inputs]
        dist.all_gather(outs, inputs[rank])
        for other, out in enumerate(outs):
            found.compare(("all_gather", scale, other), out, inputs[other])
        out = poisoned(inputs[rank])
        dist.reduce_scatter(out, [x.clone() for x in inputs])
        found.compare(("reduce_scatter", scale), out, size * inputs[rank])
        counts = [[scale * ((a + 2 * b) % 3) for b in range(size)] for a in range(size)]
        sent = [values(rank + other, (counts[rank][other], 2), "int64") for other in range(size)]
        got = [values(other + rank, (counts[other][rank], 2), "int64") for other in range(size)]
        outs = [poisoned(x) for x in got]
        dist.all_to_all(outs, sent)
        for other, out in enumerate(outs):
            found.compare(("all_to_all", scale, other), out, got[other])
        for is_async in (False, True):
            out = poisoned(torch.cat(got))
            splits = [len(x) for x in got], [len(x) for x in sent]
            work = dist.all_to_all_single(out, torch.cat(sent), *splits, async_op=is_async)
            if is_async:
                work.wait()
            found.compare(("all_to_all_single", scale, is_async), out, torch.cat(got))
    return found.wrong


def coalesce():
    import torch
    from torch import distributed as dist

    rank, size = world()
    found = Found()
    inputs = [values(rank, (count,), "float32") for count in (2, 30)]
    outs = [torch.zeros(size * 2), torch.zeros(size * 30)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for out, x in zip(outs, inputs, strict=True):
            dist.all_gather_into_tensor(out, x)
    manager.wait()
    for out, x in zip(outs, inputs, strict=True):
        whole = torch.cat([values(other, x.shape, "float32") for other in range(size)])
        found.compare(("all_gather_into_tensor", len(x)), out, whole)
    lists = [[torch.zeros(2), torch.zeros(30)] for _ in range(size)]
    dist.all_gather_coalesced(lists, inputs)
    for other, parts in enumerate(lists):
        for part in parts:
            found.compare("all_gather_coalesced", part, values(other, part.shape, "float32"))
    reduced = [x.clone() for x in inputs]
    dist.all_reduce_coalesced(reduced)
    for x in reduced:
        total = sum(values(other, x.shape, "float32") for other in range(size))
        found.compare("all_reduce_coalesced", x, total)
    parts = [torch.zeros(2), torch.zeros(30)]
    with dist._coalescing_manager():
        for part, x in zip(parts, inputs, strict=True):
            dist.reduce_scatter_tensor(part, torch.cat([x] * size))
    for part in parts:
        total = sum(values(other, part.shape, "float32") for other in range(size))
        found.compare("reduce_scatter_tensor", part, total)
    return found.wrong


def move_objects():
    from torch import distributed as dist

    rank, size = world()
    everyone = [None] * size
    dist.all_gather_object(everyone, {"rank": rank})
    listed = [rank, "b"]
    dist.broadcast_object_list(listed, size - 1)
    given = [None]
    dist.scatter_object_list(given, [f"to {other}" for other in range(size)], 0)
    gathered = [None] * size if rank == 0 else None
    dist.gather_object(rank, gathered, 0)
    expected = [{"rank": other} for other in range(size)]
    assert everyone == expected
    assert listed == [size - 1, "b"]
    assert given == [f"to {rank}"]
    assert gathered == ([*range(size)] if rank == 0 else None)
    return []


def call_functional_ones():
    import torch
    from torch import distributed as dist
    from torch.distributed import _functional_collectives as functional

    rank, size = world()
    group = dist.group.WORLD
    found = Found()
    x = values(rank, (size, 2), "float32")
    total = sum(values(other, (size, 2), "float32") for other in range(size))
    found.compare("all_reduce", functional.all_reduce(x, "sum", group) + 0, total)
    gathered = functional.all_gather_tensor(x, 0, group) + 0
    found.compare(
        "all_gather", gathered, torch.cat([values(o, (size, 2), "float32") for o in range(size)])
    )
    part = functional.reduce_scatter_tensor(x, "sum", 0, group) + 0
    found.compare("reduce_scatter", part, total[rank : rank + 1])
    swapped = functional.all_to_all_single(x, None, None, group) + 0
    expected = torch.stack([values(other, (size, 2), "float32")[rank] for other in range(size)])
    found.compare("all_to_all", swapped, expected)
    y = torch.ones(3, requires_grad=True)
    functional.all_reduce(y * (rank + 1), "sum", group)
    compiled = torch.compile(
        lambda t: functional.all_reduce(t * 2, "sum", group) + 1, backend="aot_eager"
    )
    found.compare("compiled", compiled(torch.ones(4)), torch.full((4,), 2.0 * size + 1))
    return found.wrong


def reduce_what_requires_grad():
    import torch
    from torch import distributed as dist

    _, size = world()
    found = Found()
    parameter = torch.nn.Parameter(torch.ones(3, 4))
    dist.all_reduce(parameter)
    found.compare("parameter", parameter.detach(), torch.full((3, 4), 1.0 * size))
    x = torch.ones(4, requires_grad=True)
    dist.broadcast(x * 3, 0)
    outs = [torch.zeros(4) for _ in range(size)]
    dist.all_gather(outs, x * 2)
    found.compare("all_gather", torch.stack(outs), torch.full((size, 4), 2.0))
    before = parameter._version
    dist.all_reduce(parameter)
    assert parameter.requires_grad
    assert parameter._version >= before
    return found.wrong


def reduce_sparse(is_async):
    import torch
    from torch import distributed as dist

    rank, size = world()
    found = Found()
    for dtype in (torch.float32, torch.int64):
        places = torch.tensor([[rank, 3, 3], [0, 1, 1]])
        x = torch.sparse_coo_tensor(places, torch.tensor([1, 2, 3 + rank]).to(dtype), (size + 4, 2))
        expected = sum(
            torch.sparse_coo_tensor(
                torch.tensor([[other, 3, 3], [0, 1, 1]]),
                torch.tensor([1, 2, 3 + other]).to(dtype),
                (size + 4, 2),
            ).to_dense()
            for other in range(size)
        )
        work = dist.all_reduce(x, async_op=is_async)
        if is_async:
            (x,) = work.get_future().wait()
        found.compare(("sparse", dtype), x.to_dense(), expected)
    rows = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1, 3), (size, 3))
    dist.all_reduce(rows)
    found.compare("rows", rows.to_dense(), torch.ones(size, 3))
    return found.wrong


BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
SIZES = pytest.mark.parametrize("size", [1, 2, 3])


@BOTH
@SIZES
def test_reductions(groups, size, is_async):
    assert groups.call(size, reduce_all, is_async) == [[]] * size


@SIZES
def test_every_op(groups, size):
    assert groups.call(size, reduce_by_every_op) == [[]] * size


@BOTH
@SIZES
def test_movements(groups, size, is_async):
    assert groups.call(size, move, is_async) == [[]] * size


@BOTH
@SIZES
def test_into_one_tensor(groups, size, is_async):
    assert groups.call(size, move_whole, is_async) == [[]] * size


@SIZES
def test_uneven_parts(groups, size):
    assert groups.call(size, move_unevenly) == [[]] * size


@SIZES
@pytest.mark.parametrize("call", [coalesce, move_objects, reduce_what_requires_grad])
def test_other_forms(groups, size, call):
    assert groups.call(size, call) == [[]] * size


def test_functional_collectives(groups):
    assert groups.call(2, call_functional_ones) == [[]] * 2


@BOTH
@SIZES
def test_sparse_tensors(groups, size, is_async):
    assert groups.call(size, reduce_sparse, is_async) == [[]] * size
