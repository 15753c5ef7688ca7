"""Ranks with GPUs: doubles of them in any number, or the real one of this machine."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
from tests.calls.gpu import cupy_double, kits, real
from tests.doubles import Double
from tests.hosts import PlayedHosts

from gpucoll import config
from gpucoll.backends.discovery import look_for_gpus
from gpucoll.config import environment

REAL = [pytest.param(name, marks=pytest.mark.gpu) for name in ("cupy", "torch")]
"""A real GPU, through each array library: one rank."""


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

    def held(self) -> AbstractContextManager[None]:
        """Let the current stream not go on within the block (of a double: no stream at all)."""
        gc.collect()  # an array of an earlier test, freed within the block, would wait for its end
        return self.control.held() if self.control else real.held(self.kit.current())

    def captured(self, stream: Any) -> AbstractContextManager[Any]:
        """Capture what the block enqueues on the stream; it is the current one."""
        if self.control:
            return self.control.captured(stream.ptr)
        return self.kit.captured(stream)


def in_rank(
    seat: Any,
    double: Double | str,
    function: Any,
    args: Any,
    settings: Mapping[str, int] = MappingProxyType({}),
    number: int | None = None,
) -> Any:
    """Set a rank's GPU up and call the test's function; without a double, name a library.

    `settings` are the double's, made before gpucoll looks at it; `number` is the rank's GPU, its
    own if None.
    """
    if isinstance(double, str):
        kit, control = kits.KITS[double](importlib.import_module(double)), None
    else:
        control = double.load()
        for key, value in settings.items():
            assert control.library.ncclDoubleSet(key.encode(), value) == 0, key
        kit = kits.CupyKit(cupy_double.install(double.kind))
    kit.use(seat.rank if number is None else number)
    return function(Rank(seat, kit, control), *args)


def left_on_gpu(rank: Rank) -> list[int]:
    """Return how many events and streams a double has; nothing on a real GPU."""
    return [rank.control.count(what) for what in ("events", "streams")] if rank.control else []


def with_communicator(rank: Rank, options: dict[str, Any], function: Any, args: Any) -> Any:
    """Call ``function(comm, kit, *args)``; nothing of the library may be left."""
    before = left_on_gpu(rank)
    with rank.init(**options) as comm:
        result = function(comm, rank.kit, *args)
    if rank.control is not None:
        assert rank.control.communicators == 0, "a communicator was left behind"
        assert left_on_gpu(rank)[0] == before[0], "events were left behind"  # tests leave streams
    return result


@dataclass
class Gpus:
    """Where tests of GPU arrays run."""

    pools: Any
    double: Any
    """A `Double`, or the name of the library whose arrays lie on a real GPU."""
    enter: Any = in_rank
    """What sets a rank up."""

    def world(self, world_size: int) -> int:
        """Return how many ranks there are when that many are asked for."""
        return 1 if isinstance(self.double, str) else world_size

    def call(self, world_size: int, function: Any, *args: Any, **options: Any) -> list[Any]:
        """Call ``function(comm, kit, *args)`` on each rank, with a communicator of ``options``."""
        arguments = (options, function, args)
        return self.pools.call(
            self.world(world_size),
            self.enter,
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
            self.enter,
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
            self.enter,
            self.double,
            function,
            args,
            gives="seat",
            environment=self.variables,
        )

    @property
    def variables(self) -> dict[str, str]:
        if isinstance(self.double, str):
            return {config.CPU_ONLY: "0"}
        # Ranks may have both vendors' doubles in their process.
        return {**self.double.variables, config.GPU_KIND: self.double.kind}


def in_rank_on_host(seat: Any, double: Double, function: Any, args: Any) -> Any:
    """Do the same, of a rank on a host that is played here."""
    with environment({"NCCL_HOSTID": seat.meeting.placed[seat.rank]}):
        return in_rank(seat, double, function, args)


@dataclass
class GpusOnHosts:
    """Where tests of GPU arrays run on several hosts: a word like ``"aab"`` says which ranks where.

    See `tests.hosts`.
    """

    hosts: Any
    gpus: Gpus

    def call(self, placed: str, function: Any, *args: Any, **options: Any) -> list[Any]:
        """Call ``function(comm, kit, *args)`` on each rank, with a communicator of ``options``."""
        return self.call_ranks(placed, with_communicator, options, function, args)

    def call_ranks(self, placed: str, function: Any, *args: Any) -> list[Any]:
        """Call ``function(rank, *args)`` on each `Rank`, without a communicator."""
        return self.hosts.call(placed, *self._entering(function, args), **self._options)

    def replies(self, placed: str, function: Any, *args: Any) -> list[Any]:
        """The same; return how it went on each rank."""
        return self.hosts.replies(placed, *self._entering(function, args), **self._options)

    def start(self, pool: Any, placed: str, function: Any, *args: Any) -> None:
        """Have the ranks of a pool begin, for the test to collect their replies."""
        self.hosts.start(pool, placed, *self._entering(function, args), **self._options)

    def _entering(self, function: Any, args: Any) -> tuple[Any, ...]:
        return in_rank_on_host, self.gpus.double, function, args

    @property
    def _options(self) -> dict[str, Any]:
        return {"gives": "seat", "environment": self.gpus.variables, "backend": "auto"}


def skip_without_gpu(library: str) -> None:
    seen = look_for_gpus()
    if not seen.kind:
        pytest.skip(f"no GPU: {seen.reason}")
    pytest.importorskip(library)


@pytest.fixture
def gpus(request, gpu_ranks, doubles):
    """Where a test runs: ``@pytest.mark.parametrize("gpus", ["nccl", *REAL], indirect=True)``."""
    platform = getattr(request, "param", "nccl")
    if platform in kits.KITS:
        skip_without_gpu(platform)
        return Gpus(request.getfixturevalue("real_gpu_ranks"), platform)
    return Gpus(gpu_ranks, doubles.double(platform))


@pytest.fixture
def mixed(gpu_ranks, doubles):
    """Where ranks of several kinds run: ``mixed.call("nh", function)``, see `mixed_ranks`."""
    from tests.calls.gpu.mixed_ranks import Mixed

    return Mixed(gpu_ranks, {"n": doubles.double("nccl"), "a": doubles.double("rccl")})


@pytest.fixture
def gpus_on_hosts(request, gpu_ranks, doubles, tmp_path):
    """The same on hosts that are played here: ``gpus_on_hosts.call("aab", function)``."""
    double = doubles.double(getattr(request, "param", "nccl"))
    return GpusOnHosts(PlayedHosts(gpu_ranks, tmp_path), Gpus(gpu_ranks, double))


@pytest.fixture(scope="session")
def real_gpu_ranks(rank_server):
    """Ranks that use the machine's own GPU."""
    from tests.ranks import Pools

    pools = Pools(rank_server)
    yield pools
    pools.close()


@pytest.fixture(scope="module")
def ranks_of_this_file(rank_server):
    """Ranks that only one file uses: for a library with a GPU, which they let go of at its end.

    What other files load is not in them: PyTorch for CUDA would take a double for its own libnccl.
    """
    from tests.ranks import Pools

    pools = Pools(rank_server)
    yield pools
    pools.close()


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def host_or_gpu(request):
    """Call ``function(comm, library, *args)`` of ``LIBRARY``: two ranks on the host, one on a GPU.

    So that nothing which needs a GPU is written and never run. The test's module says what
    ``LIBRARY`` is, with which ``VARIABLES``, and ``missing(library)`` why it has no GPU.
    """
    module, is_on_gpu = request.module, request.param == "gpu"
    if is_on_gpu:
        skip_without_gpu(module.LIBRARY)
    pools = request.getfixturevalue("ranks_of_this_file")
    variables = {**module.VARIABLES[request.param], config.CPU_ONLY: "0" if is_on_gpu else "1"}

    def call(function: Any, *args: Any) -> list[Any]:
        missing = module.missing if is_on_gpu else None
        results = pools.call(
            1 if is_on_gpu else 2,
            in_rank_with_library,
            module.LIBRARY,
            missing,
            function,
            args,
            gives="seat",
            environment=variables,
            limit_s=60 if is_on_gpu else 120,
        )
        if isinstance(results[0], str):
            pytest.skip(results[0])
        return results

    return call


@pytest.fixture
def on_gpu(request, ranks_of_this_file):
    """Call ``function(comm, library)`` of the module's ``LIBRARY`` on one rank, on a real GPU."""
    module = request.module
    skip_without_gpu(module.LIBRARY)
    options = {"gives": "seat", "environment": {config.CPU_ONLY: "0"}, "limit_s": 60}

    def call(function: Any) -> Any:
        arguments = in_rank_with_library, module.LIBRARY, module.missing, function, ()
        (result,) = ranks_of_this_file.call(1, *arguments, **options)
        if isinstance(result, str):
            pytest.skip(result)
        return result

    return call


def in_rank_with_library(seat: Any, library: str, missing: Any, function: Any, args: Any) -> Any:
    """Call a test's function with a communicator and a library; or say why that has no GPU."""
    module = importlib.import_module(library)
    if missing is not None and (reason := missing(module)):
        return reason
    with seat.init(timeout_s=60.0) as comm:
        return function(comm, module, *args)


EVERYWHERE = pytest.mark.parametrize("gpus", ["nccl", "rccl", *REAL], indirect=True)
"""For tests that run on both vendors' doubles and on a real GPU."""
REPLAYED = pytest.mark.parametrize("gpus", ["nccl", *REAL], indirect=True)
"""For tests that run on NVIDIA's double and on a real GPU."""


def vendors_in_turn(
    name: str, values: Sequence[Any], libraries: Sequence[Any] = (), fixture: str = "gpus"
) -> pytest.MarkDecorator:
    """Parametrize over values, of which every other one is tried with each vendor's double.

    For tests whose values have nothing to do with the vendor: both vendors and all values are
    tried, and not each with each. With every one of the `libraries`, which are `REAL`, all are.
    """
    given = [pytest.param(("nccl", "rccl")[place % 2], each) for place, each in enumerate(values)]
    given += [
        pytest.param(*library.values, each, marks=library.marks)
        for library in libraries
        for each in values
    ]
    return pytest.mark.parametrize((fixture, name), given, indirect=[fixture])
