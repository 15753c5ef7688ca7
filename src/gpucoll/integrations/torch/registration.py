"""Registration of the backend's name, at ``import torch`` if gpucoll is installed."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

NAME = "gpucoll"
DEVICES = ["cpu", "cuda"]


def register() -> None:
    """Register the backend for ``init_process_group("gpucoll")``.

    `import torch` calls this through the entry point ``torch.backends``, unless
    ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``. It loads no other file of gpucoll.
    """
    from torch import distributed

    if not distributed.is_available():
        return
    from torch.distributed import Backend

    if NAME not in Backend.backend_list:
        Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)


def _create(
    given: dist.distributed_c10d._DistributedBackendOptions, pg_options: object
) -> dist.ProcessGroup:
    """Make a process group; torch calls this on the group's ranks only."""
    with _without_collection():
        from gpucoll.integrations.torch.creation import create

    return create(given, pg_options)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Suspend garbage collection while modules are loaded, which produce no garbage.

    With torch loaded one collection takes 60 ms, and five times as long in a process just forked,
    because it writes to shared pages.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
