"""The backend's name in torch: known by ``import torch`` where gpucoll is installed."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

NAME = "gpucoll"
DEVICES = ["cpu", "cuda"]


def register() -> None:
    """Make ``init_process_group("gpucoll")`` known.

    `import torch` calls this, by the entry point ``torch.backends``, unless
    ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``. It loads nothing of gpucoll beyond this file.
    """
    from torch import distributed

    if not distributed.is_available():
        return
    from torch.distributed import Backend

    if NAME not in Backend.backend_list:
        Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)


def _create(given: Any, pg_options: Any) -> Any:
    """Make a process group; called by torch on the group's ranks alone."""
    with _without_collection():
        from gpucoll.integrations.torch.creation import create

    return create(given, pg_options)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Load modules, which make no garbage, without a collection of Python's.

    With torch loaded one takes 60 ms, and five times that in a process just forked, whose pages it
    writes to.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
