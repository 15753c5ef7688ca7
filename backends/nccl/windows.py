"""Memory of all ranks together: a symmetric window, which NCCL's fastest kernels need.

Registering a window is collective. So the ranks first agree over the control channel: if a rank has
too little memory or requests another size, all learn of it before the library is called.

Ending a window is not collective. But each rank's NCCL places the next window according to those
that it has ended so far, and a window must have the same place on all ranks (``ncclSpaceAlloc`` in
NCCL's ``dev_runtime.cc``: multicast finds it by its place). Arrays die whenever each rank's garbage
collector runs. So the ranks end windows together, before they make the next one, and only windows
that are dead on all ranks.
"""

from __future__ import annotations

from gpucoll.backends.gpu.issuer import Issuer
from gpucoll.backends.nccl import bootstrap
from gpucoll.backends.nccl.backend import NcclBackend
from gpucoll.backends.nccl.memory import Memory
from gpucoll.errors import BackendError, MismatchError
from gpucoll.group.protocol import Channel
from gpucoll.transport.shared.layout import Abort

__all__ = ["allocate"]


def allocate(
    backend: NcclBackend, issuer: Issuer, channel: Channel, size_bytes: int, timeout_s: float | None
) -> Memory:
    """Return this rank's part of a new window; every rank must call it.

    If any rank's library has no windows (before NCCL 2.27), all ranks get registered memory
    instead.

    Raises
    ------
    MemoryError
        A rank's GPU has too little free memory; all ranks raise the same error.
    MismatchError
        The ranks request different sizes. Nothing was allocated.
    BackendError
        The library failed to make the window; the communicator is broken.
    """
    registrations, group = backend.registrations, issuer.group
    issuer.synchronize()
    registrations.collect(issuer.lock, _dead_on_all(channel, registrations.dead_windows, timeout_s))
    memory, problem = None, ""
    try:
        with issuer.lock, backend.device:
            memory = registrations.allocate(size_bytes, is_registered=False)
    except (MemoryError, BackendError) as error:
        problem = str(error)
    has_windows = _agree(
        channel, size_bytes, problem, backend.library.has("ncclCommWindowRegister"), timeout_s
    )
    assert memory is not None
    watch = bootstrap.watch_of(group, issuer.calls, "registering a window", timeout_s)
    try:
        with issuer.lock:
            if has_windows:
                settle = backend.connection.settle
                registrations.register_window(memory, lambda code: settle(code, watch))
            else:
                registrations.register_memory(memory)
    except BackendError as error:
        group.abort(Abort.BACKEND)  # so that the others stop waiting for this rank
        raise group.fail(error) from None
    return memory


def _dead_on_all(channel: Channel, mine: list[int], timeout_s: float | None) -> frozenset[int]:
    """Return the windows that no rank uses any more."""
    return frozenset(mine).intersection(*bootstrap.exchange(channel, mine, timeout_s))


def _agree(
    channel: Channel, size_bytes: int, problem: str, has_windows: bool, timeout_s: float | None
) -> bool:
    """Return whether every rank has windows; raise on all ranks if one of them has a problem."""
    everyone = bootstrap.exchange(channel, [size_bytes, problem, has_windows], timeout_s)
    sizes = [size for size, _, _ in everyone]
    if len(set(sizes)) > 1:
        asked = ", ".join(f"rank {rank} {size}" for rank, size in enumerate(sizes))
        raise MismatchError(
            f"empty(symmetric=True) needs the same number of bytes on every rank; got {asked}"
        )
    for rank, (_, text, _) in enumerate(everyone):
        if text:
            raise MemoryError(f"empty(symmetric=True): rank {rank}: {text}")
    return all(has for _, _, has in everyone)
