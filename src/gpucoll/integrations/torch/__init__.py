"""gpucoll as a backend of torch.distributed: ``init_process_group("gpucoll")``.

Importing this package registers the backend; where gpucoll is installed, `import torch` does so
too. See `docs/torch.md`. The other names of this package are loaded when they are first used, so
that `import torch` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from gpucoll.integrations.torch.registration import register

if TYPE_CHECKING:
    from gpucoll.integrations.torch.gradients import CompressedGradients
    from gpucoll.integrations.torch.options import Options
    from gpucoll.integrations.torch.process_group import ProcessGroup

__all__ = ["CompressedGradients", "Options", "ProcessGroup"]

_MODULES = {
    "CompressedGradients": "gradients",
    "Options": "options",
    "ProcessGroup": "process_group",
}

register()


def __getattr__(name: str) -> type:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    kind: type = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return kind
