"""What Horovod's own tests of its calls for PyTorch leave out; prints the checks that passed."""

import inspect
import re

import horovod.torch as hvd
import numpy as np
import torch

RANK, SIZE = 0, 1


def raises(kind, text, function, *args, **named):
    """Check that a call raises an error of this kind whose text contains this pattern."""
    found = None
    try:
        function(*args, **named)
    except kind as error:
        found = str(error)
    assert found is not None, f"no {kind.__name__}"
    assert re.search(text, found), found


def handles_count_once():
    handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
    assert hvd.synchronize(handle).tolist() == [SIZE] * 3
    assert hvd.synchronize(handle) is None
    raises(ValueError, "was not created or has been cleared", hvd.poll, handle)
    handle = hvd.broadcast_async(torch.ones(3), 0)
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle).tolist() == [1, 1, 1]


def names_match_in_any_order():
    tensors = [torch.full((5,), float(i)) for i in range(40)]
    order = list(range(40))[:: 1 if RANK % 2 else -1]
    handles = {i: hvd.allreduce_async_(tensors[i], name=f"any.{i}", op=hvd.Sum) for i in order}
    for i in range(40):
        assert hvd.synchronize(handles[i]) is tensors[i]
        assert tensors[i].tolist() == [float(i * SIZE)] * 5


def dtypes():
    names = [
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
    ]
    for dtype in (getattr(torch, name) for name in names):
        x = torch.tensor([1, 2, RANK]).to(dtype)
        assert hvd.allreduce(x, op=hvd.Sum).tolist() == [SIZE, 2 * SIZE, sum(range(SIZE))]
        assert hvd.allreduce(x, op=hvd.Max).tolist() == [1, 2, SIZE - 1]
        assert hvd.allgather(x).tolist() == [v for r in range(SIZE) for v in (1, 2, r)]
    flags = torch.tensor([RANK == 0, True])
    assert hvd.broadcast(flags, SIZE - 1).tolist() == [SIZE == 1, True]
    scalar = torch.tensor(RANK + 1.0)
    assert hvd.allreduce(scalar, op=hvd.Sum).item() == SIZE * (SIZE + 1) / 2
    half = torch.full((4,), 30000.0, dtype=torch.float16)
    assert hvd.allreduce(half, op=hvd.Sum, prescale_factor=1 / SIZE).tolist() == [30000.0] * 4
    empty = hvd.allgather(torch.empty(0, 3))
    assert empty.shape == (0, 3)


def bad_arguments():
    raises(ValueError, "required to be contiguous", hvd.allreduce, torch.ones(3, 4).t())
    sparse = torch.eye(3).to_sparse()
    raises(ValueError, "Tensor type torch.sparse.FloatTensor is not supp", hvd.allreduce, sparse)
    raises(ValueError, "op parameter supersedes", hvd.allreduce, torch.ones(1), True, op=hvd.Sum)
    raises(ValueError, f"invalid root rank {SIZE}", hvd.broadcast_, torch.ones(1), SIZE)
    raises(ValueError, "even multiple", hvd.alltoall, torch.ones(SIZE + 1))
    raises(ValueError, "Number of entries", hvd.alltoall, torch.ones(9), [1] * (SIZE + 1))
    raises(ValueError, "greater than the first", hvd.alltoall, torch.ones(1), [2] * SIZE)
    long = torch.ones(SIZE, dtype=torch.int64)
    raises(ValueError, "32-bit integer", hvd.alltoall, torch.ones(9), long)
    raises(ValueError, "invalid params of type", hvd.broadcast_parameters, 5, 0)
    internal = hvd.HorovodInternalError
    raises(internal, "Adasum", hvd.reducescatter, torch.ones(4), op=hvd.Adasum)
    raises(internal, "rank-zero", hvd.allgather, torch.tensor(1.0))
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [SIZE, SIZE]


def different_tensors():
    shape = (RANK + 2,)
    text = r"(?s)Mismatched ALLREDUCE tensor shapes.*Rank 0 and rank 1 differ in 'allreduce.odd'"
    raises(hvd.HorovodInternalError, text, hvd.allreduce, torch.ones(shape), name="odd")
    dtype = torch.float32 if RANK else torch.float64
    raises(hvd.HorovodInternalError, "data types", hvd.allgather, torch.ones(2, dtype=dtype))
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [SIZE, SIZE]


def duplicates():
    handle = None
    if RANK == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="twice")
        text = "same name as another tensor"
        raises(ValueError, text, hvd.allreduce_async, torch.ones(2), name="twice")
    hvd.barrier()
    if RANK:
        handle = hvd.allreduce_async(torch.ones(2), name="twice")
    assert hvd.synchronize(handle).tolist() == [1, 1]


def results_in_place_of_what_requires_gradients():
    x = torch.ones(3, requires_grad=True)
    assert hvd.allreduce_(x, op=hvd.Sum) is x
    assert x.tolist() == [SIZE] * 3
    x = torch.full((2,), float(RANK), requires_grad=True)
    assert hvd.broadcast_(x, SIZE - 1) is x
    assert x.tolist() == [SIZE - 1] * 2


def groups_of_several_dtypes():
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(4, dtype=torch.int32)]
    for x in hvd.grouped_allreduce(tensors, op=hvd.Sum):
        assert set(x.tolist()) == {SIZE}
    given = hvd.grouped_allreduce_(tensors, op=hvd.Sum)
    assert all(x is y for x, y in zip(given, tensors, strict=True))
    gathered = hvd.grouped_allgather([torch.ones(RANK + 1), torch.ones(1, 2)])
    assert [x.shape[0] for x in gathered] == [SIZE * (SIZE + 1) // 2, SIZE]
    parts = hvd.grouped_reducescatter([torch.ones(SIZE), torch.ones(2 * SIZE + 1)], op=hvd.Sum)
    assert [x.shape[0] for x in parts] == [1, 2 + (RANK == 0)]


def gradients_of_rows_of_different_numbers():
    x = torch.ones(RANK + 1, 2, requires_grad=True)
    weights = torch.arange(float(SIZE * (SIZE + 1))).view(-1, 2)
    (hvd.allgather(x) * weights).sum().backward()
    begin = RANK * (RANK + 1) // 2
    assert torch.equal(x.grad, weights[begin : begin + RANK + 1])


def gradients_of_alltoall():
    x = torch.ones(SIZE + 1, requires_grad=True)
    rows, received = hvd.alltoall(x, splits=[1] * SIZE)
    assert received.tolist() == [1] * SIZE
    (rows * (RANK + 1)).sum().backward()
    assert x.grad.tolist() == [*(float(rank + 1) for rank in range(SIZE)), 0.0]


def gradients_that_are_not_contiguous():
    x = torch.ones(4, requires_grad=True)
    hvd.allreduce(x, op=hvd.Sum).sum().backward()
    assert x.grad.tolist() == [SIZE] * 4
    x = torch.ones(SIZE, 2, requires_grad=True)
    hvd.reducescatter(x, op=hvd.Sum).expand(1, 2).sum().backward()
    assert x.grad.tolist() == [[SIZE, SIZE]] * SIZE
    x = torch.ones(4, requires_grad=True)
    hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16).mul(2).sum().backward()
    assert x.grad.tolist() == [2.0 * SIZE] * 4


def no_graph_without_gradients():
    assert hvd.allreduce(torch.ones(2)).grad_fn is None
    with torch.no_grad():
        assert hvd.allreduce(torch.ones(2, requires_grad=True)).grad_fn is None


def inference():
    with torch.inference_mode():
        whole = hvd.allreduce_async_(torch.full((3,), 2, dtype=torch.int32))
        half = hvd.allreduce_async(torch.ones(3, dtype=torch.float16), postscale_factor=2.0)
        while not (hvd.poll(whole) and hvd.poll(half)):  # another thread does them
            pass
        assert hvd.synchronize(whole).tolist() == [2] * 3
        assert hvd.synchronize(half).tolist() == [2.0] * 3


def a_rank_joins_early():
    total = None
    for step in range(RANK + 1):
        total = hvd.allreduce(torch.ones(2), name=f"step{step}")
    assert torch.allclose(total, torch.full((2,), (SIZE - RANK) / SIZE))
    last = hvd.join()
    assert hvd.allgather_object(last) == [last] * SIZE


def adasum_of_two():
    if SIZE == 3:
        raises(NotImplementedError, "non-power of 2", hvd.allreduce, torch.ones(2), op=hvd.Adasum)
        return
    a, b = (np.random.default_rng(rank).normal(size=50).astype(np.float32) for rank in (0, 1))
    expected = (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b
    kinds = {torch.float32: 1e-5, torch.float64: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
    for dtype, error in kinds.items():
        own = torch.tensor((a, b)[RANK], dtype=dtype)
        before = own.clone()
        got = hvd.allreduce(own, op=hvd.Adasum)
        assert got.dtype == dtype
        np.testing.assert_allclose(got.float().numpy(), expected, rtol=error, atol=error)
        assert torch.equal(own, before)
        assert hvd.allreduce_(own, op=hvd.Adasum) is own
        assert torch.equal(own, got)


def process_sets():
    ranks = [0, 2] if SIZE == 3 else [1]
    some = hvd.add_process_set(ranks)
    if RANK in ranks:
        place = ranks.index(RANK)
        x = hvd.broadcast(torch.full((2,), float(RANK)), SIZE - 1, process_set=some)
        assert x.tolist() == [SIZE - 1] * 2
        x = torch.ones(place + 1, requires_grad=True)
        hvd.allgather(x, process_set=some).sum().backward()
        assert x.grad.tolist() == [1.0] * (place + 1)
        assert hvd.broadcast_object({"from": RANK}, SIZE - 1, process_set=some)["from"] == SIZE - 1
    else:
        raises(ValueError, "", hvd.allreduce, torch.ones(1), process_set=some)
    hvd.barrier()
    assert hvd.remove_process_set(some)


def objects():
    assert hvd.allgather_object((RANK, "x" * RANK)) == [(r, "x" * r) for r in range(SIZE)]
    assert hvd.broadcast_object(lambda: RANK if RANK == 0 else None, 0)() == 0


def batch_normalization_of_all_ranks():
    torch.manual_seed(1)
    n_rows = [2 + rank for rank in range(SIZE)]
    whole = torch.randn(sum(n_rows), 3, 4, dtype=torch.float64)
    weights = torch.randn_like(whole)
    begin = sum(n_rows[:RANK])
    own = slice(begin, begin + n_rows[RANK])
    expected, got = torch.nn.BatchNorm1d(3).double(), hvd.SyncBatchNorm(3).double()
    x, part = whole.clone().requires_grad_(), whole[own].clone().requires_grad_()
    for _ in range(2):
        (expected(x) * weights).sum().backward()
        y = got(part)
        (y * weights[own]).sum().backward()
    assert torch.allclose(y, expected.eval()(x)[own]) is False
    assert torch.allclose(part.grad, x.grad[own])
    assert torch.allclose(got.running_mean, expected.running_mean)
    assert torch.allclose(got.running_var, expected.running_var)
    total = hvd.allreduce(got.weight.grad, op=hvd.Sum)
    assert torch.allclose(total, expected.weight.grad)
    assert torch.allclose(got.eval()(whole), expected.eval()(whole))
    raises(ValueError, "at least 2D", got, torch.ones(3))


def main():
    global RANK, SIZE
    hvd.init(process_sets="dynamic")
    RANK, SIZE = hvd.rank(), hvd.size()
    for name, check in [*globals().items()]:
        if inspect.isfunction(check) and name not in ("raises", "main"):
            check()
            print("passed", name, flush=True)
    hvd.shutdown()


main()
