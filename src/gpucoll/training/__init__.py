"""Training over slow links: `DiLoCo`, `LocalSGD` and `average_parameters`. See docs/training.md."""

from gpucoll.training.averaging import LocalSGD, average_parameters
from gpucoll.training.diloco import DiLoCo

__all__ = ["DiLoCo", "LocalSGD", "average_parameters"]
