"""Ranks with GPUs: doubles of them in any number, or the real one of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpucoll import config
from tests.doubles import Double
from tests.gpu import cupy_double, kits

REAL = pytest.param("real", marks=pytest.mark.gpu)


@dataclass
class Rank:
    """What a test's function gets in a rank."""

    seat: Any
    kit: Any
    control: Any
    """Of the double; None on a real GPU."""

    @property
    def rank(self) -> int:
        return self.seat.rank

    @property
    def world_size(self) -> int:
        return self.seat.world_size

    def init(self, **options: Any) -> Any:
        return self.seat.init(**options)


def in_rank(seat: Any, double: Double | None, function: Any, args: Any) -> Any:
    """Set a rank's GPU up and call the test's function."""
    if double is None:
        kit, control = real_kit(), None
    else:
        control = double.load()
        kit = kits.CupyKit(cupy_double.install(double.kind))
    kit.use(seat.rank)
    return function(Rank(seat, kit, control), *args)


def real_kit() -> Any:
    """Return the array library that this machine has for its GPU."""
    try:
        import cupy

        return kits.CupyKit(cupy)
    except ImportError:
        import torch

        return kits.TorchKit(torch)


def with_communicator(rank: Rank, options: dict[str, Any], function: Any, args: Any) -> Any:
    """Call ``function(comm, kit, *args)``."""
    with rank.init(**options) as comm:
        result = function(comm, rank.kit, *args)
    if rank.control is not None:
        assert rank.control.communicators == 0, "a communicator was left behind"
    return result


@dataclass
class Gpus:
    """Where tests of GPU arrays run."""

    pools: Any
    double: Double | None

    def world(self, world_size: int) -> int:
        """Return how many ranks there are when that many are asked for."""
        return 1 if self.double is None else world_size

    def call(self, world_size: int, function: Any, *args: Any, **options: Any) -> list[Any]:
        """Call ``function(comm, kit, *args)`` on each rank, with a communicator of ``options``."""
        arguments = (options, function, args)
        return self.pools.call(
            self.world(world_size),
            in_rank,
            self.double,
            with_communicator,
            arguments,
            gives="seat",
            environment=self.variables,
        )

    def call_ranks(self, world_size: int, function: Any, *args: Any) -> list[Any]:
        """Call ``function(rank, *args)`` on each `Rank`, without a communicator."""
        return self.pools.call(
            self.world(world_size),
            in_rank,
            self.double,
            function,
            args,
            gives="seat",
            environment=self.variables,
        )

    def replies(self, world_size: int, function: Any, *args: Any) -> list[Any]:
        """The same; return how it went on each rank."""
        return self.pools.replies(
            world_size,
            in_rank,
            self.double,
            function,
            args,
            gives="seat",
            environment=self.variables,
        )

    @property
    def variables(self) -> dict[str, str]:
        if self.double is None:
            return {config.CPU_ONLY: "0"}
        # Ranks may have both vendors' doubles in their process.
        return {**self.double.variables, config.GPU_KIND: self.double.kind}


def skip_without_gpu() -> None:
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
        pytest.skip("no GPU in this machine")


@pytest.fixture
def gpus(request, gpu_ranks, doubles):
    """Where a test runs: ``@pytest.mark.parametrize("gpus", ["nccl", REAL], indirect=True)``."""
    platform = getattr(request, "param", "nccl")
    if platform == "real":
        skip_without_gpu()
        return Gpus(request.getfixturevalue("real_gpu_ranks"), None)
    return Gpus(gpu_ranks, doubles.double(platform))


@pytest.fixture(scope="session")
def real_gpu_ranks(rank_server):
    """Ranks that use the machine's own GPU."""
    from tests.ranks import Pools

    pools = Pools(rank_server)
    yield pools
    pools.close()


EVERYWHERE = pytest.mark.parametrize("gpus", ["nccl", "rccl", REAL], indirect=True)
"""For tests that run on both vendors' doubles and on a real GPU."""
REPLAYED = pytest.mark.parametrize("gpus", ["nccl", REAL], indirect=True)
"""For tests that run on NVIDIA's double and on a real GPU."""
