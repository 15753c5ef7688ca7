"""As much of torchvision as Horovod's examples import: small data made here, and small networks."""

# ruff: noqa: N801, N802  # names of torchvision

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class _Images:
    """Images whose class is the place of a bright square in them."""

    def __init__(
        self, n: int, shape: tuple[int, int, int], transform: Callable[[Any], Any]
    ) -> None:
        generator = torch.Generator().manual_seed(n)
        self._labels = torch.randint(0, 10, (n,), generator=generator)
        self._images = 0.2 * torch.rand(n, *shape, generator=generator)
        side = shape[1] // 5
        for image, label in zip(self._images, self._labels.tolist(), strict=True):
            row, column = 2 * (label // 5) * side, (label % 5) * side
            image[:, row : row + side, column : column + side] += 1
        self._transform = transform

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        return self._transform(self._images[place]), int(self._labels[place])


class datasets:
    """The datasets of the examples."""

    @staticmethod
    def MNIST(
        root: str,
        train: bool = True,
        download: bool = False,
        transform: Callable[[Any], Any] = lambda x: x,
    ) -> _Images:
        """Return 1600 images for training, or 200 for a test."""
        return _Images(1600 if train else 200, (1, 28, 28), transform)

    @staticmethod
    def ImageFolder(root: str, transform: Callable[[Any], Any]) -> _Images:
        """Return 64 images in colour."""
        return _Images(64, (3, 32, 32), transform)


class transforms:
    """Those of the examples; only `Normalize` changes anything: images are tensors already."""

    @staticmethod
    def Compose(parts: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
        def apply(x: Any) -> Any:
            for part in parts:
                x = part(x)
            return x

        return apply

    @staticmethod
    def Normalize(mean: Sequence[float], std: Sequence[float]) -> Callable[[Any], Any]:
        return lambda x: (x - mean[0]) / std[0]

    @staticmethod
    def _same(*_: Any) -> Callable[[Any], Any]:
        return lambda x: x

    ToTensor = RandomResizedCrop = RandomHorizontalFlip = Resize = CenterCrop = _same


class models:
    """A small network in place of a large one."""

    @staticmethod
    def resnet50() -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(3, 8, 5, stride=4), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(5), nn.Flatten(), nn.Linear(200, 1000)),
        )
