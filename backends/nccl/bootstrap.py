"""Connect the GPUs of ranks that share a host channel, as a communicator of the vendor's library.

Each rank finds its GPU and library (`look`). All exchange the results over the control channel,
decide in the same way whether they can be connected (`gpucoll.backends.choice.obstacle`), and join.
A rank that fails reports it, so that the others do not wait for it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from typing import Any

from gpucoll import config
from gpucoll.backends.choice import KINDS, Found, ObstacleError, obstacle
from gpucoll.backends.nccl import finding
from gpucoll.backends.nccl.communicator import NcclCommunicator
from gpucoll.collectives import Collective
from gpucoll.devices import device_count, open_device
from gpucoll.errors import BackendUnavailableError, DeadlineError
from gpucoll.group.protocol import Channel, EnqueuedCalls, Group
from gpucoll.topology.default_gpu import default_number
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.words import Status
from gpucoll.wording import list_ranks

_ID_KEY, _FOUND_KEY, _ERROR_KEY = "id", "found", "error"
_LOOK_FOR_PEERS_S = 0.02


def look(backend: str, number: int | None, group: Group) -> Found:
    """Load what this rank needs; a missing part becomes a `Found.problem`."""
    kind, library, problem = KINDS[backend], None, ""
    try:
        library = finding.load(backend)
    except (BackendUnavailableError, ImportError) as error:
        problem = _said(kind, error)
    try:  # even without the library: another backend may serve the rank's GPU
        if number is None:  # the GPU at the rank's local index
            local_rank = config.local_rank(group.local_rank)
            number = default_number(local_rank, device_count(kind)) or 0
        device = open_device(kind, number)
    except (BackendUnavailableError, ImportError) as error:
        return Found(problem or _said(kind, error))
    if library is None:
        return Found(problem, device.label)
    return Found(
        "",
        device.label,
        device.identity.uuid,
        device.identity.name,
        library.version,
        config.variable(config.NCCL_MULTI_RANK_GPU_ENABLE) == "1",
        group.here,
    )


def _said(kind: str, error: Exception) -> str:
    if isinstance(error, BackendUnavailableError):
        return str(error)
    return f"the support for {kind} GPUs cannot be loaded: {error}"


def connect(
    group: Group,
    channel: Channel,
    calls: EnqueuedCalls,
    backend: str,
    number: int | None,
    timeout_s: float | None,
) -> NcclCommunicator:
    """Join the GPUs of all ranks. Every rank must call it.

    Parameters
    ----------
    backend : str
        ``"nccl"`` or ``"rccl"``.
    number : int or None
        The number of this rank's GPU in this process; None: the GPU at the rank's local index.
    timeout_s : float or None
        Deadline for all ranks to arrive, and for the library to connect them.

    Raises
    ------
    BackendUnavailableError
        The GPUs cannot be connected; all ranks raise the same error. It is an ObstacleError if this
        was known before any rank began to join.
    """
    if interface := group.interface:
        from gpucoll.backends.nccl import network  # of use between hosts only

        network.choose_interface(interface)
    found = look(backend, number, group)
    mine: dict[str, Any] = {_FOUND_KEY: found}
    if group.rank == 0 and not found.problem:
        try:
            mine[_ID_KEY] = finding.load(backend).unique_id().hex()
        except BackendUnavailableError as problem:
            mine[_FOUND_KEY] = found._replace(problem=str(problem))
    everyone = exchange(channel, mine, timeout_s)
    all_found = [Found(*item[_FOUND_KEY]) for item in everyone]
    all_found = [item._replace(version=tuple(item.version)) for item in all_found]
    if reason := obstacle(backend, all_found):
        text = f"{backend.upper()} cannot connect these ranks: {reason}"
        raise ObstacleError(text, has_gpus=all(item.device for item in all_found))
    device = open_device(KINDS[backend], int(found.device.partition(":")[2]))
    watch = watch_of(group, calls, "connecting the GPUs", timeout_s)
    connection, error = None, ""
    try:
        connection = NcclCommunicator.join(
            finding.load(backend),
            device,
            bytes.fromhex(everyone[0][_ID_KEY]),
            group.world_size,
            group.rank,
            watch,
        )
    except BackendUnavailableError as problem:
        error = str(problem)
        calls.say_failed()
    agree(channel, backend, connection, error, timeout_s)
    assert connection is not None
    return connection


def agree(
    channel: Channel,
    backend: str,
    connection: NcclCommunicator | None,
    error: str,
    timeout_s: float | None,
) -> None:
    """Raise on every rank if any rank could not be connected."""
    try:
        everyone = exchange(channel, {_ERROR_KEY: error}, timeout_s)
    except BaseException:
        if connection is not None:
            connection.abort()
        raise
    failed = [(rank, item[_ERROR_KEY]) for rank, item in enumerate(everyone) if item[_ERROR_KEY]]
    if failed:
        if connection is not None:
            connection.abort()
        # A rank that only heard of another's failure says so; the original cause is more useful.
        rank, text = min(failed, key=lambda item: item[1].startswith(_HEARD))
        raise BackendUnavailableError(
            f"{backend.upper()} cannot connect these ranks: rank {rank}: {text}"
        )


_HEARD = "another rank failed"


def watch_of(
    group: Group,
    calls: EnqueuedCalls,
    doing: str,
    timeout_s: float | None,
    lost_ranks: Callable[[], Collection[int]] | None = None,
) -> Callable[[], None]:
    """Return a function that checks, while the library is busy, whether to go on waiting.

    `lost_ranks` returns the ranks whose loss makes waiting pointless. The default includes ranks
    that have closed the communicator, for steps that no rank completes before all ranks take part.
    """
    lost_ranks = group.gone_ranks if lost_ranks is None else lost_ranks
    limit_s = group.timeout_s if timeout_s is None else timeout_s
    begun_s = looked_s = time.monotonic()

    def watch() -> None:
        nonlocal looked_s
        if calls.compare() == Status.MISMATCH:  # ranks that make different calls may never meet
            group.abort(Abort.ENQUEUED_MISMATCH, group.rank, calls.compared + 1)
        group.raise_if_aborted()
        if failed := calls.failed_ranks():
            raise BackendUnavailableError(f"{_HEARD} ({list_ranks(failed)})")
        now_s = time.monotonic()
        if now_s - looked_s > _LOOK_FOR_PEERS_S:
            looked_s = now_s
            if lost := lost_ranks():
                group.break_with(Abort.LOST, min(lost))
        if now_s - begun_s > limit_s:
            group.abort(Abort.DEADLINE)
            raise group.fail(
                DeadlineError(
                    f"rank {group.rank} of {group.world_size} waited {limit_s:g} s in {doing}: the "
                    "vendor's library does not get on. The communicator is broken: close it"
                )
            )

    return watch


def exchange(channel: Channel, mine: Any, timeout_s: float | None) -> list[Any]:
    """Return the values of all ranks, by rank; each must be JSON-serialisable."""
    data = json.dumps(mine).encode()
    everyone = channel.all_gather_bytes(data, Collective.CONNECT, timeout_s=timeout_s)
    return [json.loads(part) for part in everyone]
