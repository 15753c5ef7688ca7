"""Functions of tests called on ranks inside a process group of torch.distributed.

>>> groups = ProcessGroups(ranks, tmp_path)
>>> groups.call(2, function, 1, 2)  # function(1, 2) on each of 2 ranks: their results

torch is loaded in the process that ranks are forked from, and in no other of the tests'.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpucoll import ArgumentError, Communicator
from tests.ranks import Pools


@dataclass(frozen=True)
class Given:
    """How a process group is made."""

    backend: str = "gpucoll"
    timeout_s: float = 20.0
    options: dict[str, Any] | None = None
    """Of `gpucoll.integrations.torch.Options`, by name."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for the making of the group and the call; without any, ranks keep to the CPU."""


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

    def call(self, world_size: int, function: Callable[..., Any], *args: Any, **given: Any) -> Any:
        """Call ``function(*args)`` on every rank; return the results, or raise the first error.

        What is `given` by name is a `Given`.
        """
        wanted = Given(**given)
        arguments = in_group, self._path(), wanted, function, args
        return self._ranks.call(world_size, *arguments, environment=wanted.environment)

    def _path(self) -> str:
        return str(self._folder / f"store {next(self._numbers)}")


def load_torch() -> None:
    """Load what process groups need, once for all ranks."""
    import importlib

    for name in ("torch.nn.parallel", "torch.distributed", "gpucoll.integrations.torch.creation"):
        importlib.import_module(name)


def in_group(
    comm: Communicator, path: str, given: Given, function: Callable[..., Any], args: Any
) -> Any:
    """Call a function in a rank, inside a process group of all ranks."""
    import torch
    from torch import distributed as dist

    from gpucoll.integrations.torch import Options

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            given.backend,
            init_method=f"file://{path}",
            rank=comm.rank,
            world_size=comm.world_size,
            timeout=datetime.timedelta(seconds=given.timeout_s),
            pg_options=Options(**given.options) if given.options else None,
        )
    except ArgumentError:
        # All are refused. None lets go while another still connects what Gloo is to serve.
        comm.barrier()
        raise
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()
