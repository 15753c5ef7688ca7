"""Gradients in half precision while they travel."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np

__all__ = ["Compression"]


class Compressor:
    """Makes an array smaller, and puts it back; a program may pass one of its own."""

    @staticmethod
    def compress(tensor: mx.nd.NDArray) -> tuple[mx.nd.NDArray, Any]:
        """Return what travels, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: mx.nd.NDArray, ctx: Any) -> mx.nd.NDArray:
        """Return an array of the original element type."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves arrays as they are."""

    @staticmethod
    def compress(tensor: mx.nd.NDArray) -> tuple[mx.nd.NDArray, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: mx.nd.NDArray, ctx: Any) -> mx.nd.NDArray:
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point arrays as float16, and others as they are."""

    @staticmethod
    def compress(tensor: mx.nd.NDArray) -> tuple[mx.nd.NDArray, Any]:
        dtype = tensor.dtype
        if np.dtype(dtype).kind != "f":
            return tensor, dtype
        return tensor.astype("float16", copy=False), dtype

    @staticmethod
    def decompress(tensor: mx.nd.NDArray, ctx: Any) -> mx.nd.NDArray:
        return tensor.astype(ctx, copy=False)


class Compression:
    """What `DistributedTrainer` takes as ``compression``."""

    none = NoneCompressor
    fp16 = FP16Compressor
