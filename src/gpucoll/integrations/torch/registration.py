"""The backend's name in torch: known by ``import torch`` where gpucoll is installed."""

from __future__ import annotations

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
    from gpucoll.integrations.torch.creation import create

    return create(given, pg_options)
