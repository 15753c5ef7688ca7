"""``horovod.torch``: names, calls, optimizers, a lost rank, and Horovod's examples."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)
PROGRAMS = Path(__file__).with_name("programs")
LOST = """
import os, signal, sys, time
import torch
import horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(3, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
x = torch.ones(4)
hvd.allreduce_(x, name="first")
if hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
for call in (lambda: hvd.allreduce_(x, name="second"), lambda: hvd.allgather(x), optimizer.step):
    begin = time.monotonic()
    try:
        call()
    except hvd.HorovodInternalError as error:
        assert isinstance(error, RuntimeError)
        print("told after", round(time.monotonic() - begin, 1), "s:", error, flush=True)
"""
ADDED = {"allgather_object": ["process_set"]}
"""Parameters that Horovod's functions have not."""


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("program", ["torch_calls.py", "torch_optimizers.py"])
def test_calls(program, n_ranks, run_program):
    done = run_program(PROGRAMS / program, n_ranks)

    assert done.returncode == 0, done.stdout + done.stderr
    passed = set(re.findall(r"passed (\w+)", done.stdout))
    written = set(re.findall(r"^def (\w+)\(\):", (PROGRAMS / program).read_text(), re.MULTILINE))
    assert passed | {"main", "network"} == written | {"main", "network"}


def test_a_lost_rank_is_named(run_program):
    done = run_program(LOST, 2)

    assert len(re.findall(r"told after [0-3]\.\d s: .*rank 1", done.stdout)) == 3, done.stdout


@pytest.fixture(scope="module")
def horovods_torch(packages, tmp_path_factory) -> Path:
    """Return the folder of ``horovod.torch``, out of Horovod's source distribution."""
    folder = packages.source_of("horovod==0.28.1", tmp_path_factory.mktemp("sdist"))
    return folder / "horovod" / "torch"


def test_parameters_are_horovods(horovods_torch):
    hvd = importlib.import_module("gpucoll.integrations.horovod.torch")

    modules = ("mpi_ops.py", "functions.py", "optimizer.py")
    nodes = [
        node for name in modules for node in ast.parse((horovods_torch / name).read_text()).body
    ]
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    public = {name: each for name, each in functions.items() if not name.startswith("_")}
    assert len(public) > 30
    for name, function in public.items():
        ours = getattr(hvd, name)
        if function.args.vararg is not None:  # init and shutdown pass everything on
            continue
        parameters = inspect.signature(ours).parameters
        added = ADDED.get(name, [])
        expected = [each.arg for each in function.args.args]
        assert [each for each in parameters if each not in added] == expected, name
        n_optional = len(function.args.defaults)
        optional = [each for each, its in parameters.items() if its.default is not its.empty]
        assert [each for each in optional if each not in added] == (
            expected[len(expected) - n_optional :]
        ), name


def test_all_names_of_horovods_package_are_there(horovods_torch):
    tree = ast.parse((horovods_torch / "__init__.py").read_text())
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (node.module or "").startswith("horovod.torch")
    }
    assert len(imported) > 60
    hvd = importlib.import_module("gpucoll.integrations.horovod.torch")
    missing = {name for name in imported if name != "elastic" and not hasattr(hvd, name)}
    assert missing == set()
    for module in ("compression", "functions", "mpi_ops", "optimizer", "sync_batch_norm"):
        importlib.import_module(f"{hvd.__name__}.{module}")
