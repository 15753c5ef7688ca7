"""The functional collectives that PyTorch 2.13 does not pass on to a process group in Python.

Two ops of `_c10d_functional`, `all_gather_into_tensor_out` and `batch_p2p_ops`, ask the group for a
backend written in C++, and a group written in Python has none. The kernels here call gpucoll's
groups directly and leave the groups of other backends to PyTorch's own kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch._C._distributed_c10d import _register_work
from torch.distributed.distributed_c10d import _resolve_process_group

from gpucoll.integrations.torch.process_group import ProcessGroup

_NAMESPACE = "_c10d_functional"
_HERE = torch._C.DispatchKey.BackendSelect
"""The key of the kernels: below autograd and what traces, above the kernels of all devices."""
_BELOW = torch._C._dispatch_keyset_full_after(_HERE)
_SERVED = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


@functools.cache
def install() -> torch.library.Library:
    """Register the kernels, once in a process; they stay while the returned library lives."""
    library = torch.library.Library(_NAMESPACE, "IMPL")
    for kernel in (all_gather_into_tensor_out, batch_p2p_ops):
        packet = getattr(torch.ops._c10d_functional, kernel.__name__, None)
        if packet is not None:
            _add(library, packet.default, kernel)
    return library


def _add(
    library: torch.library.Library, op: torch._ops.OpOverload, kernel: Callable[..., object]
) -> None:
    def run(keys: torch._C.DispatchKeySet, *args: object, **named: object) -> object:
        *_, group = args  # both ops have the group, or its name, as the last argument
        keys &= _BELOW
        if keys.highestPriorityTypeId() in _SERVED:  # tensors on the meta device have no data
            if isinstance(group, str):
                group = _resolve_process_group(group)
            if isinstance(group, ProcessGroup):
                return kernel(*args[:-1], group, **named)
        # Not PyTorch's kernel itself, of `torch.library.get_kernel`: that one runs with the GIL.
        # It would wait for a lock of Gloo's, whose thread may be about to free a tensor of
        # Python's, for which that thread takes the GIL.
        return op.redispatch(keys, *args, **named)

    library.impl(kernel.__name__, run, _HERE.name, with_keyset=True)


def all_gather_into_tensor_out(
    x: torch.Tensor, group_size: int, group: ProcessGroup, *, out: torch.Tensor
) -> torch.Tensor:
    """Gather every rank's tensor into `out`; `wait_tensor` waits for it."""
    _register_work(out, group.all_gather_single(out, x))
    return out


def batch_p2p_ops(
    ops: Sequence[str],
    peers: Sequence[int],
    tags: Sequence[int],
    tensors: Sequence[torch.Tensor],
    group: ProcessGroup,
) -> list[torch.Tensor]:
    """Start messages; return each receive's tensor, and for each send an empty one to wait for."""
    begin = {name: getattr(torch.ops._c10d_functional, name) for name in ("isend", "irecv")}
    name = group.getGroupName()
    with group.starts_together(tensors):
        return [
            begin[op](x, peer, tag, name)
            for op, peer, tag, x in zip(ops, peers, tags, tensors, strict=True)
        ]
