"""The driver's side: actors in a placement group, and runs on them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from gpucoll import ArgumentTypeError, StateError
from gpucoll.integrations.engine import arguments
from gpucoll.integrations.engine.collection import Collection
from gpucoll.integrations.engine.outcome import Outcome, lost, without_result
from gpucoll.integrations.engine.rank_call import InitOptions, Run
from gpucoll.integrations.ray.actors import KeyActor, Store
from gpucoll.integrations.ray.placement import ActorOptions, Placed, Placement

if TYPE_CHECKING:
    import ray
    from ray.util.placement_group import PlacementGroup
    from typing_extensions import Unpack

    from gpucoll.calls.given import AnyObject

__all__ = ["Workers", "run"]

_WHO = "gpucoll.integrations.ray"
_READY_S = 120.0


class WorkersOptions(TypedDict, total=False):
    """Further arguments of `Workers`."""

    num_cpus: float
    num_gpus: float
    resources: Mapping[str, float] | None
    placement_group: PlacementGroup | None
    strategy: str
    runtime_env: Mapping[str, object] | None
    ready_s: float


def run(
    function: Callable[..., object],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    world_size: int | None = None,
    init: InitOptions | None = None,
    elastic: bool = False,
    timeout_s: float | None = None,
    grace_s: float = 5.0,
    **workers: Unpack[WorkersOptions],
) -> list[AnyObject]:
    """Call ``function(comm, *args, **kwargs)`` on each of `world_size` new actors.

    Combines `Workers` and `Workers.run`; `workers` are further arguments of `Workers`.

    Returns
    -------
    list
        The function's results, in rank order.
    """
    with Workers(world_size, **workers) as made:
        return made.run(
            function, args, kwargs, init=init, elastic=elastic, timeout_s=timeout_s, grace_s=grace_s
        )


class Workers:
    """Actors that serve several runs, one for each rank.

    Parameters
    ----------
    world_size : int, optional
        Number of ranks. Default: the number of bundles of `placement_group`.
    num_cpus, num_gpus : float
        Resources of each actor. With ``num_gpus=1`` Ray shows each actor one GPU, as number 0:
        ``init={"device": 0}`` connects it at once.
    resources : mapping, optional
        Custom resources of each actor.
    placement_group : PlacementGroup, optional
        One bundle for each rank, taken from the first on; it stays the caller's. Default: a new
        group, so that either all actors get their resources or none does.
    strategy : str
        Strategy of the new placement group: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
    runtime_env : mapping, optional
        Ray's runtime environment of the actors.
    ready_s : float
        How long to wait for resources and processes, in seconds.

    Raises
    ------
    BackendUnavailableError
        Ray is not installed.
    DeadlineError
        The cluster did not have the resources for all actors in time.
    LaunchError
        An actor cannot start, or has another version of gpucoll.

    Notes
    -----
    Ranks are numbered node by node. The next run replaces a worker that was lost or that did not
    end with its run. ``close``, or the end of a ``with`` block, ends all workers.
    """

    def __init__(
        self,
        world_size: int | None = None,
        *,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        placement_group: PlacementGroup | None = None,
        strategy: str = "PACK",
        runtime_env: Mapping[str, object] | None = None,
        ready_s: float = _READY_S,
    ) -> None:
        arguments.check_world_size(_WHO, world_size)
        arguments.check_seconds(_WHO, "ready_s", ready_s, may_be_none=False)
        self._ray: Any = arguments.load("ray", "ray", _WHO)
        options: ActorOptions = {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "resources": dict(resources or {}),
        }
        if runtime_env is not None:
            options["runtime_env"] = dict(runtime_env)
        self._workers: list[Placed] = []
        self._keys: Any = None
        self._is_running = False
        self._placement = Placement(world_size, options, placement_group, strategy, float(ready_s))
        try:
            self._keys = self._placement.start_beside(KeyActor)
            self._workers = self._placement.start()
        except BaseException:
            self.close()
            raise

    @property
    def world_size(self) -> int:
        """The number of ranks of a run."""
        return self._placement.world_size

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
            Called in the main thread of each worker. Its communicator is closed afterwards.
        args, kwargs : sequence, mapping
            Further arguments, the same on every rank. An ObjectRef arrives as the object it refers
            to: use ``ray.put`` for large ones.
        init : mapping, optional
            Further arguments of `gpucoll.init`: ``{"backend": "nccl", "device": 0}``.
        elastic : bool
            Whether a run succeeds although workers are lost, as long as another rank returns: for
            functions that continue with `Communicator.shrink`. The result of a lost rank is a
            `LaunchError`.
        timeout_s : float, optional
            Seconds after which the run is ended. Default: no limit.
        grace_s : float
            How many seconds the other ranks have, after the first failure, to end by themselves.
            After that their processes are ended.

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
            A worker was lost, or a rank's exception cannot be pickled.
        DeadlineError
            Ranks had not ended after `timeout_s`.
        """
        arguments.check_call(_WHO, function, args, kwargs)
        arguments.check_seconds(_WHO, "timeout_s", timeout_s)
        arguments.check_seconds(_WHO, "grace_s", grace_s, may_be_none=False)
        if not self._workers:
            raise StateError(f"{_WHO}: these workers are closed: make new ones")
        if self._is_running:
            raise StateError(
                f"{_WHO}: these workers are in a run already: make a second Workers for "
                "simultaneous runs"
            )
        about = arguments.new_run(_WHO, self.world_size, init)
        self._is_running = True
        try:
            self._renew()
            collection = Collection(self.world_size, elastic, timeout_s, float(grace_s))
            pending = self._start(about, function, tuple(args), dict(kwargs or {}))
            self._collect(pending, collection)
            return collection.results("did not end by themselves, so their processes were ended")
        finally:
            self._is_running = False

    def close(self) -> None:
        """End all workers. May be called again."""
        workers, self._workers = self._workers, []
        for worker in workers:
            self._placement.kill(worker.actor)
        keys, self._keys = self._keys, None
        if keys is not None:
            self._placement.kill(keys)
        self._placement.remove()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _renew(self) -> None:
        """Replace lost workers."""
        cleared = self._keys.clear.remote()
        self._workers = self._placement.renewed(self._workers)
        try:
            self._ray.get(cleared)
        except self._ray.exceptions.RayError:
            self._keys = self._placement.start_beside(KeyActor)

    def _start(
        self,
        about: Run,
        function: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> dict[ray.ObjectRef, int]:
        """Start the function on every worker; return the rank of each reference."""
        head = str(self._ray.get_runtime_context().gcs_address)
        store = Store(self._keys, about.secret, head.rpartition(":")[0].strip("[]") or None)
        pending = {}
        try:
            once = self._ray.put(function)
            for rank, worker in enumerate(self._workers):
                call = worker.actor.call
                pending[call.remote(about, rank, store, once, *args, **kwargs)] = rank
        except (TypeError, AttributeError, ValueError, pickle.PicklingError) as error:
            self._end(pending)
            raise ArgumentTypeError(
                f"{_WHO}: the function or its arguments cannot be pickled: {error}"
            ) from error
        except BaseException:
            self._end(pending)
            raise
        return pending

    def _collect(self, pending: dict[ray.ObjectRef, int], collection: Collection) -> None:
        """Wait for the ranks to end; when time is over, end those that have not."""
        try:
            while pending and collection.left_s != 0:
                ready, _ = self._ray.wait(list(pending), num_returns=1, timeout=collection.left_s)
                for reference in ready:
                    collection.add(self._outcome(reference, pending.pop(reference)))
        finally:
            self._end(pending)

    def _outcome(self, reference: ray.ObjectRef, rank: int) -> Outcome:
        """Return the outcome of a rank that has ended."""
        where = str(self._workers[rank].station)
        try:
            outcome: Outcome = self._ray.get(reference)
        except self._ray.exceptions.RayActorError as error:
            how = str(error).partition("Some common causes")[0].strip()
            return lost(rank, where, f"was lost with its worker: {how}")
        except self._ray.exceptions.RayError as error:
            text = str(error).strip() or type(error).__name__
            return without_result(rank, where, f"has no result that Ray can return: {text}")
        return outcome

    def _end(self, pending: Mapping[ray.ObjectRef, int]) -> None:
        """Kill the workers of ranks that have not ended; the next run replaces them."""
        for rank in pending.values():
            self._placement.kill(self._workers[rank].actor)
