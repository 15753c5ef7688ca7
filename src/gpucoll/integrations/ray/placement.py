"""Placement of Ray's actors: their placement group, start and replacement."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from gpucoll import ArgumentError, ArgumentTypeError, DeadlineError, LaunchError, __version__
from gpucoll.integrations.ray.actors import RankActor, Station

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup
    from typing_extensions import NotRequired

__all__ = ["Placed", "Placement"]

_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_WHO = "gpucoll.integrations.ray"


class ActorOptions(TypedDict):
    """Ray's options for each actor."""

    num_cpus: float
    num_gpus: float
    resources: dict[str, float]
    runtime_env: NotRequired[dict[str, object]]


@dataclass(frozen=True)
class Placed:
    """A running actor."""

    actor: Any
    """The actor's handle."""
    bundle: int
    """The index of its bundle in the placement group."""
    station: Station
    """Where the actor runs."""


class Placement:
    """The bundles on which actors are started.

    Parameters
    ----------
    world_size : int or None
        Number of actors; None for one on each bundle of the group.
    options : mapping
        Ray's options for each actor.
    group : PlacementGroup or None
        The caller's group; None to make one, which `remove` removes.
    strategy : str
        The strategy of the group that is made.
    ready_s : float
        How long to wait for free resources and for processes, in seconds.
    """

    def __init__(
        self,
        world_size: int | None,
        options: ActorOptions,
        group: PlacementGroup | None,
        strategy: str,
        ready_s: float,
    ) -> None:
        import ray

        self._ray: Any = ray
        self._ready_s = ready_s
        self._is_own = group is None
        self._options = options
        self.world_size = _world_size(world_size, group)
        self._group: PlacementGroup = self._made(strategy) if self._is_own else group
        try:
            self._wait_for_room()
        except BaseException:
            self.remove()
            raise

    def start(self) -> list[Placed]:
        """Start an actor on every bundle; return them ordered by node, when all are running."""
        return _in_order(self._started(range(self.world_size)))

    def start_beside(self, kind: type) -> ActorHandle:
        """Start an actor that takes no resources of the cluster."""
        return self._ray.remote(num_cpus=0)(kind).remote()

    def renewed(self, workers: list[Placed]) -> list[Placed]:
        """Return the same workers, with lost ones replaced by new ones."""
        answers = {worker.actor.describe.remote(): worker for worker in workers}
        self._ray.wait(list(answers), num_returns=len(answers), timeout=self._ready_s)
        kept = []
        for answer, worker in answers.items():
            try:
                self._ray.get(answer, timeout=0)
                kept.append(worker)
            except self._ray.exceptions.RayError:
                self.kill(worker.actor)
        if len(kept) == len(workers):
            return workers
        free = {*range(self.world_size)} - {worker.bundle for worker in kept}
        return _in_order([*kept, *self._started(sorted(free))])

    def kill(self, actor: ActorHandle) -> None:
        """End an actor's process."""
        with contextlib.suppress(Exception):  # Ray may have been shut down
            self._ray.kill(actor, no_restart=True)

    def remove(self) -> None:
        """Remove the placement group, unless it is the caller's."""
        if self._is_own:
            from ray.util.placement_group import remove_placement_group

            with contextlib.suppress(Exception):  # Ray may have been shut down
                remove_placement_group(self._group)

    def _made(self, strategy: str) -> PlacementGroup:
        """Return a placement group for all actors, once the cluster has reserved its resources."""
        from ray.util.placement_group import placement_group

        if strategy not in _STRATEGIES:
            known = ", ".join(_STRATEGIES)
            raise ArgumentError(f"{_WHO}: strategy must be one of {known}; got {strategy!r}")
        takes = _bundle(self._options)
        return placement_group([takes] * self.world_size, strategy=strategy)

    def _wait_for_room(self) -> None:
        if not self._group.wait(timeout_seconds=max(1, round(self._ready_s))):
            bundle = ", ".join(
                f"{value:g} {name}" for name, value in _bundle(self._options).items()
            )
            has = ", ".join(
                f"{value:g} {name}"
                for name, value in sorted(self._ray.available_resources().items())
                if name in ("CPU", "GPU", *self._options["resources"])
            )
            raise DeadlineError(
                f"{_WHO}: the cluster had no room for {self.world_size} workers of {bundle} each "
                f"within {self._ready_s:g} s; free: {has or 'none of these'}"
            )

    def _started(self, bundles: Iterable[int]) -> list[Placed]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actors = {}
        for bundle in bundles:
            where = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            )
            actors[bundle] = (
                self._ray.remote(RankActor)
                .options(scheduling_strategy=where, **self._options)
                .remote()
            )
        try:
            return self._described(actors)
        except BaseException:
            for actor in actors.values():
                self.kill(actor)
            raise

    def _described(self, actors: Mapping[int, ActorHandle]) -> list[Placed]:
        """Return the actors of these bundles when all of them are running."""
        deadline = time.monotonic() + self._ready_s
        answers = {bundle: actor.describe.remote() for bundle, actor in actors.items()}
        placed = []
        for bundle, answer in answers.items():
            try:
                left_s = max(0.0, deadline - time.monotonic())
                station: Station = self._ray.get(answer, timeout=left_s)
            except self._ray.exceptions.GetTimeoutError as error:
                raise DeadlineError(
                    f"{_WHO}: a worker's process did not start within {self._ready_s:g} s"
                ) from error
            except self._ray.exceptions.RayError as error:
                raise LaunchError(
                    f"{_WHO}: a worker cannot start ({error}). gpucoll must be installed on every "
                    "node"
                ) from error
            if station.version != __version__:
                raise LaunchError(
                    f"{_WHO}: {station} has gpucoll {station.version}, the driver {__version__}: "
                    "all need the same version"
                )
            placed.append(Placed(actors[bundle], bundle, station))
        return placed


def _world_size(world_size: int | None, group: PlacementGroup | None) -> int:
    if group is None:
        if world_size is None:
            raise ArgumentError(f"{_WHO}: give world_size or placement_group")
        return int(world_size)
    bundles = getattr(group, "bundle_count", None)
    if not isinstance(bundles, int):
        raise ArgumentTypeError(
            f"{_WHO}: placement_group must be a PlacementGroup; got {type(group).__name__}"
        )
    if world_size is not None and world_size > bundles:
        raise ArgumentError(
            f"{_WHO}: world_size is {world_size}, but the placement group has {bundles} bundles: "
            "each rank needs one"
        )
    return int(world_size or bundles)


def _bundle(options: ActorOptions) -> dict[str, float]:
    """Return the resources of one actor, as a bundle."""
    takes = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], **options["resources"]}
    bundle = {name: value for name, value in takes.items() if value}
    if not bundle:
        raise ArgumentError(
            f"{_WHO}: each worker must reserve some resource: num_cpus, num_gpus or resources"
        )
    return bundle


def _in_order(workers: list[Placed]) -> list[Placed]:
    """Return the workers in the best order for ranks: by node, nodes by their first bundle."""
    workers = sorted(workers, key=lambda worker: worker.bundle)
    nodes: dict[str, int] = {}
    for worker in workers:
        nodes.setdefault(worker.station.node, len(nodes))
    return sorted(workers, key=lambda worker: nodes[worker.station.node])
