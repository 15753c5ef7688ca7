"""gpucoll as a backend of torch.distributed: ``init_process_group("gpucoll")``.

Importing this registers it; `import torch` does so too where gpucoll is installed. `docs/torch.md`.
"""

from __future__ import annotations

from gpucoll.integrations.torch.gradients import CompressedGradients
from gpucoll.integrations.torch.options import Options
from gpucoll.integrations.torch.process_group import ProcessGroup
from gpucoll.integrations.torch.registration import register

__all__ = ["CompressedGradients", "Options", "ProcessGroup"]

register()
