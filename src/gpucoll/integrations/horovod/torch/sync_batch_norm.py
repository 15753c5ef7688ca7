"""Batch normalization by the statistics of all ranks' batches."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from gpucoll.integrations.horovod.basics import Sum, size
from gpucoll.integrations.horovod.torch.reductions import allreduce

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_BatchNorm):
    """A `torch.nn.BatchNorm1d`, 2d or 3d whose batch is that of all ranks together.

    Each forward pass reduces the channels' means, then their variances, over the ranks, which may
    have batches of different sizes; so does the backward pass. Tensors may lie on the host, too.

    Parameters
    ----------
    num_features : int
        Channels: the second dimension of the input.
    eps, momentum, affine, track_running_stats
        As in torch's class.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalized input."""
        self._check_input_dim(input)
        by_batch = self.training or self.running_mean is None
        if not by_batch or size() == 1:
            return super().forward(input)
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        mean, variance, count = _statistics(x)
        if self.training and self.track_running_stats:
            self._track(mean.detach(), variance.detach(), count)
        result = (x - _along(mean, x)) * _along((variance + self.eps).rsqrt(), x)
        if self.affine:
            result = result * _along(self.weight, x) + _along(self.bias, x)
        return result.to(input.dtype)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:
            share = 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


def _statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean and variance of each channel, and the elements of a channel, over all ranks."""
    other = [axis for axis in range(x.dim()) if axis != 1]
    own = x.new_tensor([x.numel() // x.shape[1]])
    sums = allreduce(torch.cat([x.sum(other), own]), name="sync_batch_norm.sum", op=Sum)
    count = sums[-1].detach()
    mean = sums[:-1] / count
    squares = (x - _along(mean, x)).square().sum(other)
    variance = allreduce(squares, name="sync_batch_norm.squares", op=Sum) / count
    return mean, variance, count


def _along(channels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return one value for each channel in a form that meets x."""
    return channels.view(1, -1, *[1] * (x.dim() - 2))
