"""Calls inside functions that torch.compile has compiled: made as they stand, between graphs."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")


def compile_a_step(comm):
    """Compile a function that calls in every way; return its results on changing inputs."""
    torch: Any = importlib.import_module("torch")
    planned = torch.zeros(3)
    plan = comm.plan_all_reduce(planned, out=planned)

    def step(x):
        doubled = x * 2
        total = comm.all_reduce(doubled)
        again = comm.all_reduce(total + 1, out=doubled)
        later = comm.all_reduce(x, async_op=True).wait()
        with comm.group():
            grouped = comm.all_reduce(x)
        planned.copy_(x)
        return again + later + grouped + plan()

    compiled = torch.compile(step, backend="aot_eager")
    inputs = [torch.full((3,), float(value)) for value in range(1, 6)]
    results = [(compiled(x).tolist(), step(x).tolist()) for x in inputs]
    whole = torch.compile(lambda x: comm.all_reduce(x), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="gpucoll communicator cannot be part of a compiled graph"):
        whole(inputs[0])
    return results


@pytest.mark.filterwarnings("default")  # of PyTorch
@pytest.mark.parametrize("world_size", [2])
def test_calls_in_a_compiled_function(ranks, world_size):
    # again = P (2 P x + 1), and P x three times
    size = world_size
    expected = [[2.0 * size * size * x + size + 3 * size * x] * 3 for x in range(1, 6)]
    for results in ranks.call(world_size, compile_a_step):
        assert results == [(values, values) for values in expected]


def test_nothing_of_pytorch_is_loaded_for_it():
    code = (
        "import sys, torch, gpucoll\n"
        "with gpucoll.init() as comm:\n"
        "    comm.all_reduce(torch.ones(3))\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr
