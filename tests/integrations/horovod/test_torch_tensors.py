"""Torch in unusual ways: tied and conjugated tensors, inference mode, closures."""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)

PROGRAM = """
import torch
import horovod.torch as hvd

hvd.init()
rank = hvd.rank()

torch.manual_seed(rank)
model = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(2)])
model[1].weight = model[0].weight
hvd.broadcast_parameters(model.state_dict(), 0)
found = hvd.allgather(model[1].weight.detach())
assert torch.equal(found[:3], found[3:])

x = torch.tensor([1 + 2j, 3 - 1j])
if rank == 0:
    x = x.conj()
assert hvd.allreduce(x, op=hvd.Sum).tolist() == [2, 6]
assert hvd.allgather(x).tolist() == [1 - 2j, 3 + 1j, 1 + 2j, 3 - 1j]
assert hvd.alltoall(x).tolist() == ([1 - 2j, 1 + 2j] if rank == 0 else [3 + 1j, 3 - 1j])
assert hvd.reducescatter(x, op=hvd.Sum).tolist() == ([2] if rank == 0 else [6])

with torch.inference_mode():
    handle = hvd.allreduce_async_(x := torch.full((4,), 4.0), op=hvd.Sum, prescale_factor=0.5)
while not hvd.poll(handle):  # the driver thread is in no such mode
    pass
hvd.synchronize(handle)
assert x.tolist() == [4.0] * 4

try:
    hvd.allreduce(torch.ones(4, dtype=torch.int32), op=hvd.Adasum)
except hvd.HorovodInternalError as error:
    assert "Adasum takes float16, float32, float64; got" in str(error)
else:
    raise AssertionError("nothing was raised")
for dtype in (torch.float16, torch.bfloat16):
    assert hvd.allreduce(torch.ones(4, dtype=dtype), op=hvd.Adasum).tolist() == [1.0] * 4
try:
    hvd.alltoall(torch.ones(4), splits=[-1, 3])
except ValueError as error:
    assert "must not be negative" in str(error)
else:
    raise AssertionError("nothing was raised")
print("done")
"""


def test_unusual_tensors(run_program):
    done = run_program(PROGRAM, 2)
    assert done.stdout.split() == ["done"] * 2, done.stderr


CLOSURE = """
import torch
import horovod.torch as hvd

hvd.init()
for make in (torch.optim.SGD, torch.optim.LBFGS):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(make([weight], lr=0.1), [("weight", weight)])

    def closure():
        optimizer.zero_grad()
        loss = ((weight - hvd.rank()) ** 2).sum()
        loss.backward()
        return hvd.allreduce(loss.detach(), name="loss")

    for _ in range(3):
        optimizer.step(closure)
    found = hvd.allgather(weight.detach(), name="weight")
    assert torch.equal(found[:3], found[3:]), found
    assert found.max() < 1
print("done")
"""


def test_gradients_of_a_closure_are_reduced(run_program):
    done = run_program(CLOSURE, 2)
    assert done.stdout.split() == ["done"] * 2, done.stderr
