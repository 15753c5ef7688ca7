"""Executes rows of `gpucoll.api.coming_from`: the code of another library, and gpucoll's.

Both run on two ranks with equal inputs, and what they leave in their variables is compared. As a
program, ``python -m tests.coming_from LIBRARY``, each rank does that for all rows of a library, and
prints those that differ.
"""

from __future__ import annotations

import ast
import atexit
import importlib
import os
import re
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import gpucoll
from gpucoll.api.coming_from import Row, rows

Make = Callable[[list[Any]], Any]
Variables = dict[str, Any]

COMPARED = (
    "x",
    "out",
    "blocks",
    "values",
    "filled",
    "tensors",
    "work",
    "group",
    "received",
    "result",
)
SENDS = ("comm.send(", "comm.send_object(", "comm.plan_send(")
RECEIVES = ("comm.recv(", "comm.recv_object(", "comm.plan_recv(", "comm.probe(")
WITHOUT_HOST_ARRAYS = ("comm.register(x)", "comm.empty(shape, like=x)")
"""What gpucoll refuses on host arrays, with a BackendUnavailableError or ArgumentError."""
ENDING = ("comm.close()", "comm.abort()", "comm.shrink()", "comm.grow()")
UNDEFINED = {"comm.Exscan(x, out, op)": ("out", 0), "dist.reduce(x, root, op)": ("x", 1)}
"""What the other library leaves undefined: a variable, and the rank."""


def given(row: Row, rank: int, make: Make) -> Variables:
    """Return the inputs of a row on a rank, and the arrays for its results."""
    here = row.here
    n_rows = [1, 3][rank] if "gather" in here and "counts" in here else 4
    n_out = 4
    if re.search(r"gather\(x", here):
        n_out = 4 if "counts" in here else 8
    elif re.search(r"(\.|reduce_)scatter\(", here):
        n_out = [1, 3][rank] if "counts" in here else 2
    elif "recv_counts" in here:
        n_out = [3, 5][rank]
    x = [(0.0 if "assert" in here else 10.0 * rank) + place for place in range(n_rows)]
    of_lists = {"all_gather(x": 4, "gather(x": 4, "all_to_all(": 2, "scatter(": 2}
    n_block = next((n for part, n in of_lists.items() if part in here), 2)
    blocks = [make([90.0 + place] * n_block) for place in range(2)]
    is_gathered = row.there.startswith("dist.gather_object(")
    is_given = ".scatter(blocks" in here or ".gather(x, root, out=blocks" in here
    return {
        "rank": rank,
        "world_size": 2,
        "root": 0,
        "dest": 1 - rank,
        "source": 1 - rank,
        "tag": 7 if "tag" in row.here else 0,
        "color": 0,
        "key": -rank,
        "ranks": [1],
        "rows": 2,
        "columns": 1,
        "timeout_s": 20.0,
        "factor": 2.0,
        "number": rank + 1.0,
        "value": f"rank {rank}",
        "host": socket.gethostname(),
        "shape": (4,),
        "values": None if rank and is_gathered else [f"{rank} to {each}" for each in range(2)],
        "filled": [None],
        "counts": [1, 3],
        "send_counts": [[1, 3], [2, 2]][rank],
        "recv_counts": [[1, 2], [3, 2]][rank],
        "x": make(x),
        "out": make([-1.0] * n_out),
        "blocks": None if is_given and rank == 1 else blocks,
        "parcels": [make(x[:2]), make(x[2:])],
        "tensors": [make(x), make(x[:1])],
        "function": lambda left, right: left + right,
        "op": "sum",
    }


def of_here(row: Row, comm: gpucoll.Communicator, make: Make) -> Variables:
    """Return the variables of gpucoll's code."""
    modules = {"gpucoll": gpucoll, "np": np, "socket": socket, "time": time}
    mine = comm.duplicate() if row.here.startswith(ENDING) else comm
    return {**given(row, comm.rank, make), **modules, "comm": mine}


PREPARED_HERE = {
    "work": "work = comm.all_reduce(x, op, out=out, async_op=True)",
    "group": "group = comm.duplicate()",
}
BESIDE_HERE = {
    "send": ("_other = comm.recv(out, source, tag, async_op=True)", "_other.wait()"),
    "recv": ("_other = comm.send(x, dest, tag, async_op=True)", "_other.wait()"),
    "probe": (
        "_other = comm.send(x, dest, tag, async_op=True)",
        "comm.recv(out, source, tag); _other.wait()",
    ),
    "send object": (
        "_other = comm.recv_object(source, tag, async_op=True)",
        "received = _other.wait()",
    ),
    "recv object": ("comm.send_object(value, dest, tag)", ""),
}


def run_here(row: Row, comm: gpucoll.Communicator, make: Make, **more: Any) -> Variables:
    """Run gpucoll's code of a row; return what it leaves in its variables, as `plain` shows it."""
    variables = {**of_here(row, comm, make), **more}
    code = row.here.replace("op=", "") if row.here.startswith("op=") else row.here
    try:
        if "gcj." in code:
            variables["gcj"] = importlib.import_module("gpucoll.integrations.jax")
            variables["result"] = compiled(code, variables, is_mapped=False)
        else:
            run_beside(row, code, variables, PREPARED_HERE, BESIDE_HERE)
    except (gpucoll.BackendUnavailableError, gpucoll.ArgumentError):
        if row.here not in WITHOUT_HOST_ARRAYS:
            raise
    left = plain_of(variables)
    for value in variables.values():
        for each in value if isinstance(value, tuple | list) else [value]:
            if isinstance(each, gpucoll.Communicator) and each is not comm:
                each.close()
    return left


def run_beside(
    row: Row,
    code: str,
    variables: Variables,
    prepared: dict[str, str],
    beside: dict[str, tuple[str, str]],
) -> Variables:
    """Run code with what it needs: variables that exist, and the other end of a message."""
    for name, preparation in prepared.items():
        if name in needed(code):
            run(preparation, variables)
    before, after = beside.get(message_of(row), ("", ""))
    run(before, variables)
    run(code, variables)
    result = variables.pop("result", None)
    run(after, variables)
    variables["result"] = result
    variables["work"] = ended(variables.get("work"))
    return variables


def message_of(row: Row) -> str:
    """Return which end of a message a row is, and of what; "" if it is none."""
    kind = "send" if row.here.startswith(SENDS) else "recv" if row.here.startswith(RECEIVES) else ""
    if "probe(" in row.here and ".recv(" not in row.here:
        kind = "probe"
    return f"{kind} object" if kind and "object" in row.here else kind


def needed(code: str) -> set[str]:
    """Return the variables that code reads and does not make."""
    names = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
    made = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return {node.id for node in names} - made


def run(code: str, variables: Variables) -> Variables:
    """Run code; the value of a last expression is the variable `result`."""
    tree = ast.parse(code)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    exec(compile(tree, code, "exec"), variables)  # noqa: S102  (a table of this project)
    if isinstance(last, ast.Expr):
        expression = ast.Expression(last.value)
        variables["result"] = ended(eval(compile(expression, code, "eval"), variables))  # noqa: S307
    return variables


def ended(result: Any) -> Any:
    """Return the result of a call that was started, or that is prepared."""
    if isinstance(result, gpucoll.Plan):
        return result()
    if hasattr(result, "Start"):  # MPI's persistent requests
        result.Start()
    for name in ("wait", "Wait"):
        if hasattr(result, name):
            return getattr(result, name)()
    return result


def plain(value: Any) -> Any:
    """Return a value as lists and numbers, which compare between libraries; or None."""
    if isinstance(value, gpucoll.Communicator):
        return ["communicator", value.rank, value.world_size]
    if hasattr(value, "Get_rank"):
        return ["communicator", value.Get_rank(), value.Get_size()] if value else None
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value if isinstance(value, str | int | float | dict) else None


def plain_of(variables: Variables) -> Variables:
    """Return the variables that are compared, as `plain` shows them."""
    return {name: plain(variables.get(name)) for name in COMPARED}


def difference(
    row: Row, rank: int, make: Make, there: Variables, here: Variables
) -> tuple[str, int]:
    """Return how the variables differ after the two codes of a row, and how many were compared.

    Only those count that the code has changed.
    """
    before = plain_of(given(row, rank, make))
    n_compared = 0
    for name in COMPARED:
        pair = there[name], here[name]
        if UNDEFINED.get(row.there) == (name, rank) or type(pair[0]) is not type(pair[1]):
            continue
        if pair[0] != pair[1]:
            return f"{name}: {pair[0]} there, {pair[1]} here", 1
        n_compared += pair[0] not in (None, before[name])
    return "", n_compared


# --- the other libraries --------------------------------------------------------------------------


class Side(NamedTuple):
    """How another library's code is run."""

    names: Variables
    """Its modules, ops and communicator."""
    prepared: dict[str, str]
    beside: dict[str, tuple[str, str]]
    make: Make


def mpi4py_side() -> tuple[Side, gpucoll.Communicator]:
    """Return how mpi4py's code is run under an MPI, and gpucoll's communicator of the ranks."""
    from mpi4py import MPI

    comm = gpucoll.Communicator.from_mpi(MPI.COMM_WORLD, backend="cpu", timeout_s=60.0)
    names = {"MPI": MPI, "comm": MPI.COMM_WORLD.Dup(), "op": MPI.SUM}
    names["reduce_buffers"] = lambda left, right, datatype: None
    prepared = {
        "request": "request = comm.Iallreduce(x, out, op)",
        "status": "status = MPI.Status()",
    }
    receive = "_other = comm.Irecv(out, source, tag)", "_other.Wait()"
    send = "_other = comm.Isend(x, dest, tag)", "_other.Wait()"
    beside = {
        "send": receive,
        "recv": send,
        "probe": (send[0], "comm.Recv(out, source, tag); _other.Wait()"),
        "send object": ("_other = comm.irecv(source=source, tag=tag)", "received = _other.wait()"),
        "recv object": ("_other = comm.isend(value, dest, tag)", "_other.wait()"),
    }
    return Side(names, prepared, beside, lambda items: np.array(items, np.float64)), comm


def torch_side() -> tuple[Side, gpucoll.Communicator]:
    """Return how torch.distributed's code is run over Gloo, and gpucoll's communicator."""
    import torch
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    comm = gpucoll.init(timeout_s=60.0)
    path = comm.broadcast_object(str(Path(tempfile.gettempdir()) / f"gloo-{os.getpid()}"))
    atexit.register(Path(path).unlink, missing_ok=True)
    dist.init_process_group(
        "gloo", f"file://{path}", rank=comm.rank, world_size=2, timeout=timedelta(seconds=60)
    )
    names = {"dist": dist, "op": dist.ReduceOp.SUM, "timedelta": timedelta}
    names["init_device_mesh"] = init_device_mesh
    receive = "_other = dist.irecv(out, source, tag=tag)", "_other.wait()"
    send = "_other = dist.isend(x, dest, tag=tag)", "_other.wait()"
    objects = "dist.send_object_list(values, 1); filled = ['']", "filled = ['']"
    beside = {"send": receive, "recv": send, "send object": objects}
    prepared = {"group": "group = dist.new_group([0, 1])"}
    return Side(
        names, prepared, beside, lambda items: torch.tensor(items, dtype=torch.float32)
    ), comm


def horovod_side() -> tuple[Side, gpucoll.Communicator]:
    """Return how Horovod's code is run over gpucoll's own front, and gpucoll's communicator."""
    import torch

    hvd: Any = importlib.import_module("gpucoll.integrations.horovod.torch")

    hvd.init()
    comm = gpucoll.init(name="here", timeout_s=60.0)
    names = {"hvd": hvd, "op": hvd.Sum}
    prepared = {
        "handle": "handle = hvd.allreduce_async(x, op=op)",
        "splits": "import torch; splits = torch.tensor(send_counts, dtype=torch.int32)",
        "named_tensors": "named_tensors = [('a', tensors[0]), ('b', tensors[1])]",
    }
    return Side(names, prepared, {}, lambda items: torch.tensor(items, dtype=torch.float32)), comm


def jax_side() -> tuple[Side, gpucoll.Communicator]:
    """Return how JAX's code is run in two processes over Gloo, and gpucoll's communicator."""
    import jax
    from jax.experimental import multihost_utils

    comm = gpucoll.init(timeout_s=60.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = comm.broadcast_object(server.getsockname()[1])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, comm.rank)
    names = {"jax": jax, "multihost_utils": multihost_utils}
    return Side(names, {}, {}, jax.numpy.array), comm


def compiled(code: str, variables: Variables, is_mapped: bool) -> Any:
    """Return the value of code of JAX under pmap, with the axis "i", or under jit."""
    import jax

    def function(x: Any) -> Any:
        return eval(code, {**variables, "x": x})  # noqa: S307

    if is_mapped:
        return jax.pmap(function, axis_name="i")(variables["x"][None]).addressable_data(0)[0]
    return jax.jit(function)(variables["x"])


SIDES = {
    "JAX": jax_side,
    "mpi4py": mpi4py_side,
    "torch.distributed": torch_side,
    "Horovod": horovod_side,
}


def run_there(row: Row, rank: int, side: Side) -> Variables:
    """Run the other library's code of a row; return what it leaves in its variables."""
    variables = {**given(row, rank, side.make), **side.names}
    if '"i"' in row.there:
        variables["result"] = compiled(row.there, variables, is_mapped=True)
    else:
        run_beside(row, row.there, variables, side.prepared, side.beside)
    return plain_of(variables)


def compare(library: str) -> dict[str, str]:
    """Run both codes of each row of a library on this rank; return what is wrong, by row."""
    side, comm = SIDES[library]()
    wrong: dict[str, str] = {}
    compared: Counter[str] = Counter()
    for row in rows():
        if row.library == library and row.here and row.tested != "named":
            left: list[Variables] = []
            # A code that fails on one rank must not keep it from the next one.
            both = partial(run_there, row, comm.rank, side), partial(run_here, row, comm, side.make)
            for code in both:
                try:
                    left.append(code())
                except Exception:
                    wrong[row.there] = traceback.format_exc(limit=-3)
            if len(left) == 2 and row.tested == "equal":
                text, n_compared = difference(row, comm.rank, side.make, *left)
                wrong |= {row.there: text} if text else {}
                compared[row.there] += n_compared
    of_ranks = comm.all_gather_object(compared)
    idle = [code for code in compared if not any(each[code] for each in of_ranks)]
    return dict.fromkeys(idle, "nothing was compared") | wrong


if __name__ == "__main__":
    found = compare(sys.argv[1])
    for code, text in found.items():
        print(f"{code}\n    {text}", flush=True)
    sys.exit(bool(found))
