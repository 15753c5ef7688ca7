"""Elastic training with PyTorch: ``hvd.elastic``."""

from __future__ import annotations

from gpucoll.integrations.horovod.elastic import run
from gpucoll.integrations.horovod.torch.elastic.sampler import ElasticSampler
from gpucoll.integrations.horovod.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "run"]
