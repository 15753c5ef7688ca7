"""The names of mpi4py, torch.distributed, Horovod and NCCL's bindings, and their names in gpucoll.

The AttributeError for one of those names gives the name to use instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

_ASYNC = "; the Work that it returns has wait() and done()"
_MPI, _TORCH, _HOROVOD, _NCCL = "mpi4py", "torch.distributed", "Horovod", "NCCL"

CALLS: dict[str, tuple[str, str]] = {
    "Get_rank": (_MPI, "comm.rank"),
    "Get_size": (_MPI, "comm.world_size"),
    "size": (_MPI, "comm.world_size"),
    "Allreduce": (_MPI, "comm.all_reduce(x, op, out=out)"),
    "allreduce": (
        _MPI,
        "comm.all_reduce(x, op) or, for objects, comm.all_reduce_object(value, function)",
    ),
    "Iallreduce": (_MPI, f"comm.all_reduce(x, op, async_op=True){_ASYNC}"),
    "Reduce": (_MPI, "comm.reduce(x, op, root, out=out)"),
    "Ireduce": (_MPI, f"comm.reduce(x, op, root, async_op=True){_ASYNC}"),
    "Bcast": (_MPI, "comm.broadcast(x, root, out=x)"),
    "bcast": (_MPI, "comm.broadcast(x, root) or, for objects, comm.broadcast_object(value, root)"),
    "Ibcast": (_MPI, f"comm.broadcast(x, root, out=x, async_op=True){_ASYNC}"),
    "Scatter": (_MPI, "comm.scatter(x, root, out=out)"),
    "Scatterv": (_MPI, "comm.scatter(x, root, counts=counts, out=out)"),
    "Gather": (_MPI, "comm.gather(x, root, out=out)"),
    "Gatherv": (_MPI, "comm.gather(x, root, counts=counts, out=out)"),
    "Allgather": (_MPI, "comm.all_gather(x, out=out)"),
    "allgather": (_MPI, "comm.all_gather(x) or, for objects, comm.all_gather_object(value)"),
    "Allgatherv": (_MPI, "comm.all_gather(x, counts=counts, out=out)"),
    "Iallgather": (_MPI, f"comm.all_gather(x, async_op=True){_ASYNC}"),
    "Alltoall": (_MPI, "comm.all_to_all(x, out=out)"),
    "alltoall": (_MPI, "comm.all_to_all(x); x is one array with a block for each rank"),
    "Alltoallv": (_MPI, "comm.all_to_all(x, send_counts=..., recv_counts=..., out=out)"),
    "Ialltoall": (_MPI, f"comm.all_to_all(x, async_op=True){_ASYNC}"),
    "Reduce_scatter": (_MPI, "comm.reduce_scatter(x, op, counts=counts, out=out)"),
    "Reduce_scatter_block": (_MPI, "comm.reduce_scatter(x, op, out=out)"),
    "Scan": (_MPI, "comm.scan(x, op, out=out)"),
    "Exscan": (_MPI, "comm.exclusive_scan(x, op, out=out)"),
    "exscan": (_MPI, "comm.exclusive_scan(x, op)"),
    "Barrier": (_MPI, "comm.barrier()"),
    "Ibarrier": (_MPI, "comm.barrier(); it waits"),
    "Send": (_MPI, "comm.send(x, dest, tag)"),
    "Ssend": (_MPI, "comm.send(x, dest, tag, synchronous=True)"),
    "ssend": (_MPI, "comm.send(x, dest, tag, synchronous=True)"),
    "Isend": (_MPI, f"comm.send(x, dest, tag, async_op=True){_ASYNC}"),
    "isend": (_MPI, f"comm.send(x, dest, tag, async_op=True){_ASYNC}"),
    "Recv": (_MPI, "comm.recv(out, source, tag)"),
    "Irecv": (_MPI, f"comm.recv(out, source, tag, async_op=True){_ASYNC}"),
    "irecv": (_MPI, f"comm.recv(out, source, tag, async_op=True){_ASYNC}"),
    "Sendrecv": (_MPI, "comm.send_recv(x, dest, source, out)"),
    "sendrecv": (_MPI, "comm.send_recv(x, dest, source)"),
    "Probe": (_MPI, "comm.probe(source, tag)"),
    "Iprobe": (_MPI, "comm.probe(source, tag, wait=False)"),
    "iprobe": (_MPI, "comm.probe(source, tag, wait=False)"),
    "Split": (_MPI, "comm.split(color, key)"),
    "Dup": (_MPI, "comm.duplicate()"),
    "dup": (_MPI, "comm.duplicate()"),
    "Clone": (_MPI, "comm.duplicate()"),
    "Create": (_MPI, "comm.split(color, key); ranks outside the new communicator pass color=None"),
    "Create_group": (
        _MPI,
        "comm.split(color, key); ranks outside the new communicator pass color=None",
    ),
    "Free": (_MPI, "comm.close()"),
    "Disconnect": (_MPI, "comm.close()"),
    "Abort": (_MPI, "comm.abort()"),
    "get_rank": (_TORCH, "comm.rank"),
    "get_world_size": (_TORCH, "comm.world_size"),
    "all_gather_into_tensor": (_TORCH, "comm.all_gather(x, out=out)"),
    "reduce_scatter_tensor": (_TORCH, "comm.reduce_scatter(x, op, out=out)"),
    "all_to_all_single": (_TORCH, "comm.all_to_all(x, send_counts=..., recv_counts=..., out=out)"),
    "all_reduce_coalesced": (_TORCH, "comm.all_reduce(list_of_arrays)"),
    "broadcast_object_list": (_TORCH, "comm.broadcast_object(value, root)"),
    "scatter_object_list": (_TORCH, "comm.scatter_object(values, root)"),
    "batch_isend_irecv": (_TORCH, "with comm.group(): comm.send(...), comm.recv(...)"),
    "monitored_barrier": (_TORCH, "comm.barrier(timeout_s=...); its error names the late ranks"),
    "new_group": (
        _TORCH,
        "comm.split(color, key); ranks outside the new communicator pass color=None",
    ),
    "destroy_process_group": (_TORCH, "comm.close()"),
    "reducescatter": (_HOROVOD, "comm.reduce_scatter(x, op)"),
    "grouped_allreduce": (_HOROVOD, "comm.all_reduce(list_of_arrays)"),
    "allreduce_async": (_HOROVOD, f"comm.all_reduce(x, op, async_op=True){_ASYNC}"),
    "allgather_object": (_HOROVOD, "comm.all_gather_object(value)"),
    "broadcast_parameters": (_HOROVOD, "comm.broadcast(list_of_arrays, root, out=list_of_arrays)"),
    "shutdown": (_HOROVOD, "comm.close()"),
    "allReduce": (_NCCL, "comm.all_reduce(x, op, out=out)"),
    "allGather": (_NCCL, "comm.all_gather(x, out=out)"),
    "reduceScatter": (_NCCL, "comm.reduce_scatter(x, op, out=out)"),
    "groupStart": (_NCCL, "with comm.group():"),
    "groupEnd": (_NCCL, "with comm.group():"),
    "rank_id": (_NCCL, "comm.rank"),
    "check_async_error": (_NCCL, "comm.check()"),
    "destroy": (_NCCL, "comm.close()"),
}
"""Name elsewhere -> the library that has it, and what to use here."""

MEMBERS = (
    *("abort", "all_gather", "all_gather_object", "all_reduce", "all_reduce_object", "all_to_all"),
    *("barrier", "broadcast", "broadcast_object", "check", "close", "completed", "describe"),
    *("duplicate", "empty", "epoch", "exclusive_scan", "former_ranks", "from_mpi"),
    *("gather", "gather_object", "group", "grow", "is_closed"),
    *("plan_all_gather", "plan_all_reduce", "plan_all_to_all", "plan_broadcast"),
    *("plan_exclusive_scan", "plan_gather", "plan_reduce", "plan_reduce_scatter", "plan_scan"),
    *("plan_recv", "plan_scatter", "plan_send", "probe", "rank", "recv", "recv_object", "reduce"),
    *("reduce_scatter", "register", "resumed_from", "scan", "scatter", "scatter_object", "send"),
    *("send_object", "send_recv", "shared_arrays", "shrink", "split", "world_size"),
)
"""The members of a communicator, listed here so that its class need not be imported."""

_MODULE: dict[str, tuple[str, str]] = {
    "COMM_WORLD": (_MPI, "the communicator that gpucoll.init() returns"),
    "MPI": (_MPI, "the module gpucoll; gpucoll.init() returns the communicator"),
    "Init": (_MPI, "comm = gpucoll.init()"),
    "Finalize": (_MPI, "comm.close()"),
    "init_process_group": (_TORCH, "comm = gpucoll.init()"),
    "is_initialized": (_TORCH, "not needed; a communicator is always initialised"),
    "NcclCommunicator": (_NCCL, "the communicator that gpucoll.init() returns"),
    "get_unique_id": (_NCCL, "not needed; gpucoll.init() brings the ranks together"),
    "Op": (_MPI, "gpucoll.ReduceOp"),
    "SUM": (_MPI, 'op="sum"'),
    "PROD": (_MPI, 'op="prod"'),
    "MIN": (_MPI, 'op="min"'),
    "MAX": (_MPI, 'op="max"'),
}


def is_public(name: str) -> bool:
    """Return whether a person may have written this name; tools ask for the other names."""
    return not name.startswith("_")


def missing_from_communicator(name: str) -> str:
    """Return the text of the AttributeError for a name of another library's communicator."""
    return f"'Communicator' object has no attribute {name!r}: {_elsewhere(name, CALLS)}"


def missing_from_package(name: str, names: Iterable[str]) -> str:
    """Return the text of the AttributeError for a name that the package lacks.

    `names` are those that the package has.
    """
    start = f"module 'gpucoll' has no attribute {name!r}"
    if not is_public(name):
        return start
    if name in _MODULE:
        return f"{start}: {_elsewhere(name, _MODULE)}"
    if name in CALLS:
        return f"{start}: {_elsewhere(name, CALLS)}, with comm = gpucoll.init()"
    if name in MEMBERS:
        return f"{start}: a communicator has it: comm = gpucoll.init(), then comm.{name}"
    return start + _close_to(name, [*names, *(f"comm.{member}" for member in MEMBERS)])


def _elsewhere(name: str, table: dict[str, tuple[str, str]]) -> str:
    whose, here = table[name]
    call, mark, rest = here.partition(";")
    return f"{whose}'s {name} is {call} here{mark}{rest}"


def _close_to(name: str, names: Iterable[str]) -> str:
    import difflib

    by_short = {each.removeprefix("comm."): each for each in names}
    found = difflib.get_close_matches(name, by_short, n=1, cutoff=0.7)
    return f"; did you mean {by_short[found[0]]}?" if found else ""


class _Elsewhere:
    """A name of another library: reading it raises an AttributeError with the name to use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> NoReturn:
        raise AttributeError(missing_from_communicator(self._name))


class _Hidden(type):
    """Metaclass whose ``dir`` omits these names, so that `help` and tools do not see them."""

    def __dir__(cls) -> list[str]:
        return [name for name in super().__dir__() if name not in CALLS]


class SaysNamesElsewhere(metaclass=_Hidden):
    """Base of `Communicator` that answers names of other libraries with the name to use.

    It has no ``__getattr__``: in a class that has one, CPython looks up every attribute the slow
    way, even those that exist (measured: 65 ns of a small scatter's 205).
    """

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in CALLS]


for _name in CALLS:
    setattr(SaysNamesElsewhere, _name, _Elsewhere(_name))
