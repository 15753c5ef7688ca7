"""Gradients travel as they are, or as float16."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor:
    """How a tensor is made smaller before it travels, and is restored afterwards."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return what travels, and what `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor as it was."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Changes nothing."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        half = tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor
        return half, tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tf.cast(tensor, ctx) if ctx.is_floating else tensor


class Compression:
    """The compressors, for the parameter ``compression``."""

    none = NoneCompressor
    fp16 = FP16Compressor
