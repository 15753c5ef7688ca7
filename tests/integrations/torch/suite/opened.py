"""Load PyTorch's module of tests for a backend whose name it does not know.

The module decides while it is loaded which tests a backend gets: by names of backends, and by what
is in `DistTestCases`. Here it is loaded as for gloo, whose tests need no GPU, and told the name
afterwards; until then its decorators are replaced where they would leave out what is to be run, or
would start processes that leave at once.
"""

from __future__ import annotations

import importlib
import os
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SUITE = "torch.testing._internal.distributed.distributed_test"
DECORATORS = "torch.testing._internal.common_distributed"
CONDITIONS = "torch.testing._internal.common_utils"

ONLY_MPI = "Only MPI supports"  # so say the tests of all_to_all, which PyTorch runs with MPI alone
SMALLEST_WITH_GROUPS = 3  # ranks: their groups are of ranks 1 and 2
TIMEOUT_S = 60.0


def load(backend: str, world_size: int) -> Any:
    """Return PyTorch's module of distributed tests, for a backend and a number of ranks."""
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(world_size),
        INIT_METHOD="file://",  # asked for the scheme alone; each test gets a file of its own
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(int(TIMEOUT_S)),
        OMP_NUM_THREADS="1",
    )
    with _replaced(world_size):
        module = importlib.import_module(SUITE)
    os.environ["BACKEND"] = backend
    module.BACKEND = backend  # type: ignore[attr-defined]
    return module


@contextmanager
def _replaced(world_size: int) -> Iterator[None]:
    """Replace decorators of PyTorch's while its tests are decorated."""
    import torch

    decorators, conditions = map(importlib.import_module, (DECORATORS, CONDITIONS))
    new: list[tuple[Any, str, Any]] = [
        (conditions, "skip_but_pass_in_sandcastle_if", _unless_only_for_mpi),
        (decorators, "skip_if_small_worldsize", _with_groups(world_size)),
    ]
    if not torch.accelerator.is_available():
        # PyTorch's start ranks that find no GPU: a quarter of a second each, for 100 tests.
        reason = "needs GPUs"
        new.append((decorators, "skip_if_no_gpu", unittest.skip(reason)))
        new.append((decorators, "skip_if_lt_x_gpu", lambda *_, **__: unittest.skip(reason)))
    old = [(module, name, getattr(module, name)) for module, name, _ in new]
    for module, name, value in new:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in old:
            setattr(module, name, value)


def _unless_only_for_mpi(condition: bool, reason: str) -> Callable[[Any], Any]:
    return unittest.skipIf(condition and not reason.startswith(ONLY_MPI), reason)


def _with_groups(world_size: int) -> Callable[[Any], Any]:
    """What PyTorch leaves out below 8 ranks (without MPI), although three are enough."""
    few = world_size < SMALLEST_WITH_GROUPS
    return unittest.skipIf(few, f"needs {SMALLEST_WITH_GROUPS} ranks")
