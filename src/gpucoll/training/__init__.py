"""Training over slow links: `DiLoCo`, `LocalSGD` and `average_parameters`. See docs/training.md."""

from gpucoll.training.diloco import DiLoCo, LocalSGD, average_parameters

__all__ = ["DiLoCo", "LocalSGD", "average_parameters"]
