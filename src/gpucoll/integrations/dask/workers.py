"""The driver's side: workers of a cluster, and runs on them."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, TypedDict

from gpucoll import ArgumentError, ArgumentTypeError, DeadlineError, LaunchError, __version__
from gpucoll.integrations.dask import on_worker
from gpucoll.integrations.dask.following import Following
from gpucoll.integrations.dask.on_worker import Order, Station
from gpucoll.integrations.engine import arguments
from gpucoll.integrations.engine.collection import Collection

if TYPE_CHECKING:
    from distributed import Client
    from typing_extensions import Unpack

    from gpucoll.calls.given import AnyObject
    from gpucoll.integrations.engine.rank_call import InitOptions

__all__ = ["Workers", "run"]

_WHO = "gpucoll.integrations.dask"


class RunOptions(TypedDict, total=False):
    """Further arguments of `Workers.run`."""

    init: InitOptions | None
    elastic: bool
    timeout_s: float | None
    grace_s: float


def run(
    function: Callable[..., object],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    world_size: int | None = None,
    client: Client | None = None,
    workers: Sequence[str] | None = None,
    **options: Unpack[RunOptions],
) -> list[AnyObject]:
    """Call ``function(comm, *args, **kwargs)`` on workers of a Dask cluster.

    Combines `Workers` and `Workers.run`; `options` are further arguments of `Workers.run`.

    Returns
    -------
    list
        The function's results, in rank order.
    """
    made = Workers(world_size, client=client, workers=workers)
    return made.run(function, args, kwargs, **options)


class Workers:
    """Workers of a cluster, each of which is a rank in a run.

    Parameters
    ----------
    world_size : int, optional
        Number of ranks; a run waits until that many workers are there. Default: all workers that
        are there when a run begins.
    client : distributed.Client, optional
        The client of the cluster. Default: the current one.
    workers : sequence of str, optional
        Addresses of the workers that may take part. Default: all.
    ready_s : float
        How long to wait for enough workers, in seconds.

    Raises
    ------
    BackendUnavailableError
        distributed is not installed.
    ArgumentError
        There is no client, or it is an asynchronous one.

    Notes
    -----
    The workers still belong to the cluster; nothing needs to be closed. Ranks are numbered host by
    host. Several runs, and Dask's tasks, can run at the same time: a rank takes no slot of its
    worker.
    """

    def __init__(
        self,
        world_size: int | None = None,
        *,
        client: Client | None = None,
        workers: Sequence[str] | None = None,
        ready_s: float = 60.0,
    ) -> None:
        arguments.check_world_size(_WHO, world_size)
        arguments.check_seconds(_WHO, "ready_s", ready_s, may_be_none=False)
        distributed = arguments.load("distributed", "distributed", _WHO)
        if workers is not None and (isinstance(workers, str) or not len(workers)):
            raise ArgumentError(f"{_WHO}: workers must be a list of addresses; got {workers!r}")
        self._client = _checked(client, distributed)
        self._world_size, self._ready_s = world_size, float(ready_s)
        self._addresses = None if workers is None else list(workers)

    def run(
        self,
        function: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        init: InitOptions | None = None,
        elastic: bool = False,
        timeout_s: float | None = None,
        grace_s: float = 5.0,
    ) -> list[AnyObject]:
        """Call ``function(comm, *args, **kwargs)`` on each worker, with a new communicator.

        Parameters
        ----------
        function : callable
            Called in a thread of its own in each worker's process. Its communicator is closed
            afterwards.
        args, kwargs : sequence, mapping
            Further arguments, the same on every rank; they are pickled by cloudpickle.
        init : mapping, optional
            Further arguments of `gpucoll.init`: ``{"backend": "nccl", "device": 0}``.
        elastic : bool
            Whether a run succeeds although workers are lost, as long as another rank returns: for
            functions that continue with `Communicator.shrink`. The result of a lost rank is a
            `LaunchError`.
        timeout_s : float, optional
            Seconds after which the run is given up. Default: no limit.
        grace_s : float
            How many seconds the other ranks have, after the first failure, to end by themselves.
            After that their communicators are aborted; a rank ends at its next call of one.

        Returns
        -------
        list
            The function's results, in rank order.

        Raises
        ------
        Exception
            The error of the first rank that failed; its ``__cause__`` is a `LaunchError` with the
            rank, its host and its traceback. Errors that follow from the loss of another rank are
            raised only if there is no other.
        LaunchError
            A worker was lost, has no gpucoll or another version, or a rank's exception or result
            cannot be pickled.
        DeadlineError
            Ranks had not ended after `timeout_s`, or there were too few workers after `ready_s`.
        """
        arguments.check_call(_WHO, function, args, kwargs)
        arguments.check_seconds(_WHO, "timeout_s", timeout_s)
        arguments.check_seconds(_WHO, "grace_s", grace_s, may_be_none=False)
        options = arguments.checked_options(_WHO, init)
        body = _pickled(options, function, tuple(args), dict(kwargs or {}))
        stations = self._stations()
        about = arguments.new_run(_WHO, len(stations), None)
        order = Order(about, {address: rank for rank, address in enumerate(stations)}, body)
        collection = Collection(len(stations), elastic, timeout_s, float(grace_s))
        Following(self._client, order, stations, collection).wait()
        return collection.results("have been told to end at their next call of the communicator")

    # --- who takes part ---------------------------------------------------------------------------

    def _stations(self) -> dict[str, Station]:
        """Return the workers that take part, by address, in rank order."""
        addresses = self._present()
        found = self._client.run(on_worker.describe, workers=addresses, on_error="return")
        for address, station in found.items():
            if isinstance(station, Exception):
                raise LaunchError(
                    f"{_WHO}: the worker {address} cannot take part: gpucoll must be installed on "
                    f"every worker ({type(station).__name__}: {station})"
                ) from station
            if station.version != __version__:
                raise LaunchError(
                    f"{_WHO}: the worker {address} ({station}) has gpucoll {station.version}, the "
                    f"driver {__version__}: all need the same version"
                )
        chosen = _in_order(found)[: self._world_size]
        processes: dict[str, str] = {}
        for address in chosen:
            if other := processes.get(str(found[address])):
                raise ArgumentError(
                    f"{_WHO}: the workers {other} and {address} are one process "
                    f"({found[address]}), but each rank needs its own: use "
                    "LocalCluster(processes=True) or `dask worker --nworkers`"
                )
            processes[str(found[address])] = address
        return {address: found[address] for address in chosen}

    def _present(self) -> list[str]:
        """Return the addresses of enough workers."""
        if self._addresses is None:
            count = int(self._world_size or 1)
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                self._client.wait_for_workers(count, timeout=self._ready_s)
        present = list(self._client.nthreads())
        if self._addresses is not None:
            count = int(self._world_size or len(self._addresses))
            if missing := [address for address in self._addresses if address not in present]:
                raise LaunchError(f"{_WHO}: the cluster has no worker {', '.join(missing)}")
            present = self._addresses
        if len(present) < count:
            raise DeadlineError(
                f"{_WHO}: {count} workers are needed; {len(present)} were there within "
                f"{self._ready_s:g} s"
            )
        return present


def _checked(client: Client | None, distributed: ModuleType) -> Client:
    """Return the client of the cluster."""
    if client is None:
        try:
            client = distributed.Client.current()
        except ValueError as error:
            raise ArgumentError(
                f"{_WHO}: there is no client: make one (distributed.Client(address)), or pass "
                "client="
            ) from error
    if not isinstance(client, distributed.Client):
        raise ArgumentTypeError(
            f"{_WHO}: client must be a distributed.Client; got {type(client).__name__}"
        )
    if client.asynchronous:
        raise ArgumentError(
            f"{_WHO}: the client is asynchronous, and a run would block its event loop: make "
            "another one in a thread, with Client(address)"
        )
    return client


def _pickled(*parts: object) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(parts))
    except (TypeError, AttributeError, ValueError, pickle.PicklingError) as error:
        raise ArgumentTypeError(
            f"{_WHO}: the function or its arguments cannot be pickled: {error}"
        ) from error


def _in_order(found: Mapping[str, Station]) -> list[str]:
    """Return the addresses ordered by host, which is the best order for ranks."""
    hosts: dict[str, int] = {}
    for station in found.values():
        hosts.setdefault(station.host, len(hosts))
    return sorted(found, key=lambda address: hosts[found[address].host])
