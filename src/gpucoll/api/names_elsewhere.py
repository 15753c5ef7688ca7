"""The names of mpi4py, torch.distributed, Horovod and other libraries on a communicator.

Each of them is an attribute whose AttributeError says what to write here instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from gpucoll.api.coming_from import Row

# Written by tools/coming_from.py, here and to the next line like it.
NAMES = (
    "Abort", "Accept", "Agree", "Allgather", "Allgatherv", "Allreduce", "Allreduce_init",
    "Alltoall", "Alltoallv", "Barrier", "Bcast", "Bsend", "Clone", "Connect", "Create",
    "Create_cart", "Create_dist_graph_adjacent", "Create_graph", "Create_group",
    "Create_intercomm", "Disconnect", "Dup", "Exscan", "Finalize", "Free", "Gather", "Gatherv",
    "Get_rank", "Get_size", "IN_PLACE", "Iallgather", "Iallreduce", "Ialltoall", "Ibarrier",
    "Ibcast", "Igather", "Iprobe", "Irecv", "Ireduce", "Iscatter", "Isend", "MAXLOC", "MINLOC",
    "Mprobe", "Neighbor_allgather", "Neighbor_alltoall", "P2POp", "PROC_NULL", "Probe",
    "ProcessSet", "Recv", "Recv_init", "Reduce", "Reduce_scatter", "Reduce_scatter_block",
    "Revoke", "Rsend", "Scan", "Scatter", "Scatterv", "Send", "Send_init", "Sendrecv",
    "Set_errhandler", "Shrink", "Spawn", "Split", "Split_type", "Ssend", "Status",
    "add_process_set", "allGather", "allReduce", "all_gather_into_tensor", "all_gather_single",
    "all_reduce_coalesced", "all_to_all_single", "allgather", "allgather_object", "allreduce",
    "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "assert_equal", "axis_index",
    "axis_size", "batch_isend_irecv", "bcast", "broadcast_", "broadcast_object_list",
    "broadcast_one_to_all", "broadcast_parameters", "check_async_error", "commSplit", "destroy",
    "destroy_process_group", "device", "device_id", "dup", "exscan", "finalize", "get_async_error",
    "get_backend", "get_global_rank", "get_last_error", "get_process_group_ranks", "get_rank",
    "get_world_size", "groupEnd", "groupStart", "group_end", "group_start", "grouped_allreduce",
    "init_device_mesh", "iprobe", "irecv", "is_initialized", "isend", "local_rank", "local_size",
    "mem_alloc", "monitored_barrier", "mprobe", "new_group", "new_subgroups", "nranks",
    "process_allgather", "process_count", "process_index", "put_signal", "rank_id",
    "recv_object_list", "reduceScatter", "reduce_scatter_single", "reduce_scatter_tensor",
    "reducescatter", "register_buffer", "register_window", "resume", "revoke",
    "scatter_object_list", "send_object_list", "sendrecv", "shutdown", "signal", "size",
    "split_group", "ssend", "stop", "suspend", "sync_global_devices", "wait_signal",
)  # fmt: skip
# The end of what tools/coming_from.py writes.
"""The names that a communicator of another library has, or that stand for a method of one here.

`gpucoll.api.coming_from` has their rows, which only an error reads.
"""

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


def is_public(name: str) -> bool:
    """Return whether a person may have written this name; tools ask for the other names."""
    return not name.startswith("_")


def missing_from_communicator(name: str) -> str:
    """Return the text of the AttributeError for a name of another library's communicator."""
    return f"'Communicator' object has no attribute {name!r}: {_elsewhere(name)}"


def missing_from_package(name: str, names: Iterable[str]) -> str:
    """Return the text of the AttributeError for a name that the package lacks.

    `names` are those that the package has.
    """
    start = f"module 'gpucoll' has no attribute {name!r}"
    if not is_public(name):
        return start
    if name in MEMBERS:
        return f"{start}: a communicator has it: comm = gpucoll.init(), then comm.{name}"
    if said := _elsewhere(name, ", with comm = gpucoll.init()"):
        return f"{start}: {said}"
    return start + _close_to(name, [*names, *(f"comm.{member}" for member in MEMBERS)])


def _elsewhere(name: str, what_comm_is: str = "") -> str:
    """Return what to write instead of a name of other libraries; an empty string if it is none."""
    from gpucoll.api.coming_from import rows  # only an error needs it

    said: dict[str, str] = {}  # by what to write: libraries often agree
    for row in rows():
        if name in row.names and (here := _here(row, name)) not in said:
            whose = f"{row.library}'s" if said else f"{row.library}'s {name}"
            first = what_comm_is if "comm." in here and not said else ""
            differs = f"; {row.differs}" if row.differs else ""
            said[here] = f"{whose} is {here} here{first}{differs}"
            if not here:
                said[here] = f"{whose} does not exist here{differs}"
    return ". ".join(said.values()).replace("`", "")


def _here(row: Row, name: str) -> str:
    """Return what to write, without the variable that it is assigned to."""
    here = row.here if ";" in row.here else re.sub(r"^\w+ = ", "", row.here)
    # In a row of ops each name has its own.
    return here.split(", ")[row.names.index(name)] if here.startswith("op=") else here


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
        return [*{*super().__dir__()} - {*NAMES}]


class SaysNamesElsewhere(metaclass=_Hidden):
    """Base of `Communicator` that answers names of other libraries with the name to use.

    It has no ``__getattr__``: in a class that has one, CPython looks up every attribute the slow
    way, even those that exist (measured: 65 ns of a small scatter's 205).
    """

    def __dir__(self) -> list[str]:
        return [*{*super().__dir__()} - {*NAMES}]


for _name in NAMES:
    setattr(SaysNamesElsewhere, _name, _Elsewhere(_name))
