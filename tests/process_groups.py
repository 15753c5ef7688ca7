"""Functions of tests called on ranks inside a process group of torch.distributed.

>>> groups = ProcessGroups(ranks, tmp_path)
>>> groups.call(2, function, 1, 2)  # function(1, 2) on each of 2 ranks: their results

torch is loaded in the process that ranks are forked from, and in no other of the tests'.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpucoll import Communicator
from tests.ranks import Pools

TIMEOUT_S = 20.0


class ProcessGroups:
    """Calls functions of tests in process groups that are made for each call.

    Parameters
    ----------
    ranks : Pools
        The processes.
    folder : Path
        For the files by which groups meet.
    """

    def __init__(self, ranks: Pools, folder: Path) -> None:
        self._ranks, self._folder = ranks, folder
        self._numbers = itertools.count()

    def call(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        backend: str = "gpucoll",
        timeout_s: float = TIMEOUT_S,
        options: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call ``function(*args)`` on every rank; return the results, or raise the first error."""
        given = backend, timeout_s, options
        return self._ranks.call(world_size, in_group, self._path(), given, function, args)

    def replies(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        backend: str = "gpucoll",
        timeout_s: float = TIMEOUT_S,
        options: dict[str, Any] | None = None,
    ) -> list[Any]:
        """The same, but return how it went on each rank."""
        given = backend, timeout_s, options
        return self._ranks.replies(world_size, in_group, self._path(), given, function, args)

    def _path(self) -> str:
        return str(self._folder / f"store {next(self._numbers)}")


def load_torch() -> None:
    """Load what process groups need, once for all ranks."""
    import importlib

    for name in ("torch.nn.parallel", "torch.distributed", "gpucoll.integrations.torch.creation"):
        importlib.import_module(name)


def in_group(
    comm: Communicator, path: str, given: Any, function: Callable[..., Any], args: Any
) -> Any:
    """Call a function in a rank, inside a process group of all ranks."""
    import torch
    from torch import distributed as dist

    from gpucoll.integrations.torch import Options

    backend, timeout_s, options = given
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{path}",
        rank=comm.rank,
        world_size=comm.world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
        pg_options=Options(**options) if options else None,
    )
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()
