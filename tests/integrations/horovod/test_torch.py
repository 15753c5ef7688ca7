"""``horovod.torch``: names, calls, optimizers, a lost rank, and Horovod's examples."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
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
    missing = {name for name in imported if not hasattr(hvd, name)}
    assert missing == set()
    for module in ("compression", "functions", "mpi_ops", "optimizer", "sync_batch_norm"):
        importlib.import_module(f"{hvd.__name__}.{module}")


@pytest.fixture
def run_example(horovod_source, run_program, tmp_path):
    """Return a function that runs one of Horovod's examples, with a stand-in for torchvision."""
    places = [str(PROGRAMS.with_name("stand_ins")), os.environ.get("PYTHONPATH", "")]
    environment = {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, places))}

    def run(name: str, *arguments: str) -> str:
        path = horovod_source / "examples" / name
        done = run_program(path, 2, *arguments, environment=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout)

    return run


@pytest.mark.parametrize(
    "options", ["", "--fp16-allreduce --gradient-predivide-factor 2", "--use-adasum"]
)
def test_the_mnist_example(options, run_example):
    arguments = ["--epochs", "2", "--lr", "0.05", *options.split()]

    output = run_example("pytorch/pytorch_mnist.py", *arguments)

    losses = [float(loss) for loss in re.findall(r"Average loss: ([\d.]+)", output)]
    assert len(losses) == 2
    assert losses[1] < losses[0] / 2
    assert float(re.findall(r"Accuracy: ([\d.]+)%", output)[-1]) > 95


def test_the_synthetic_benchmark(run_example):
    few = [
        "--batch-size",
        "2",
        "--num-iters",
        "2",
        "--num-warmup-batches",
        "1",
        "--num-batches-per-iter",
        "2",
    ]

    output = run_example("pytorch/pytorch_synthetic_benchmark.py", *few)

    assert "Total img/sec on 2 CPU(s)" in output


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_the_adasum_example(op, run_example):
    assert f"1.0 {op} 0.1 2 " in run_example("adasum/adasum_small_model.py", "--op", op)


IGNITE = """
import torch
import ignite.distributed as idist
from ignite.engine import Engine
from ignite.metrics import Accuracy, RunningAverage

def training(local_rank):
    torch.manual_seed(idist.get_rank())
    model = idist.auto_model(torch.nn.Linear(4, 2))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.5))
    weights = [x.clone() for x in idist.all_gather(model.weight.detach()[None])]
    assert torch.equal(weights[0], weights[1]), "auto_model did not broadcast"

    def step(engine, batch):
        optimizer.zero_grad()
        x, y = batch
        predicted = model(x)
        loss = torch.nn.functional.cross_entropy(predicted, y)
        loss.backward()
        optimizer.step()
        return predicted, y

    accuracy = Accuracy()
    trainer = Engine(step)
    accuracy.attach(trainer, "accuracy")
    x = torch.randn(64, 4)
    trainer.run([(x, (x[:, 0] > x[:, 1]).long())] * 40, max_epochs=2)
    weights = idist.all_gather(model.weight.detach()[None])
    assert torch.equal(weights[0], weights[1])
    assert trainer.state.metrics["accuracy"] > 0.9
    assert idist.all_reduce(idist.get_rank() + 1) == 3
    assert idist.all_gather(f"rank {idist.get_rank()}") == ["rank 0", "rank 1"]
    assert idist.broadcast(idist.get_rank(), src=1) == 1
    idist.barrier()
    print("accuracy", trainer.state.metrics["accuracy"], flush=True)

with idist.Parallel(backend="horovod") as parallel:
    parallel.run(training)
"""
PYRO = """
import torch
import pyro
import horovod.torch as hvd
import pyro.distributions as dist
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam, HorovodOptimizer

hvd.init()
pyro.set_rng_seed(0)

def model(x):
    loc = pyro.sample("loc", dist.Normal(0.0, 10.0))
    with pyro.plate("data", len(x), subsample_size=None):
        pyro.sample("obs", dist.Normal(loc, 1.0), obs=x)

data = torch.randn(200) + torch.tensor([3.0, 5.0])[hvd.rank()]
guide = AutoNormal(model)
guide(data)
hvd.broadcast_parameters(guide.state_dict(), root_rank=0)
pyro.set_rng_seed(hvd.rank())
svi = SVI(model, guide, HorovodOptimizer(Adam({"lr": 0.05})), Trace_ELBO())
for _ in range(150):
    svi.step(data)
locs = hvd.allgather(guide.locs.loc.detach().reshape(1))
assert locs[0] == locs[1], locs
assert 3.7 < locs[0] < 4.3, locs
print("loc", locs.tolist(), flush=True)
"""


@pytest.mark.parametrize(
    ("program", "packages_needed", "said"),
    [
        (IGNITE, ["pytorch-ignite"], "accuracy"),
        (PYRO, ["pyro-ppl", "pyro-api", "opt_einsum", "tqdm"], "loc"),
    ],
    ids=["ignite", "pyro"],
)
def test_libraries_that_use_horovod(
    program, packages_needed, said, packages, run_program, tmp_path
):
    folder = packages.fetched(tmp_path / "packages", *packages_needed)
    places = [str(folder), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, places))

    done = run_program(program, 2, environment={"PYTHONPATH": path})

    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(f"^{said}", done.stdout, re.MULTILINE)) == 2
