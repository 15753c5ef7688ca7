"""NumPy arrays, as the engine sees them: TensorFlow's and MXNet's host tensors are such views."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gpucoll.integrations.horovod.engine.request import Request

__all__ = ["HALF", "NumpyArrays"]

HALF = ("float16", "bfloat16")


class NumpyArrays:
    """An `ArrayLibrary` of host arrays."""

    name = "numpy"

    def dtype(self, x: Any) -> str:
        return str(x.dtype.name)

    def look(self, x: Any) -> Hashable:
        return x.dtype, x.shape

    def device(self, x: Any) -> str:
        return "CPU"

    def zeros(self, dtype: str, shape: tuple[int, ...], device: str) -> Any:
        return np.zeros(shape, dtype_named(dtype))

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        return np.empty(shape, like.dtype)

    def scale(self, x: Any, factor: float, out: Any) -> None:
        if factor == 1.0:
            out[...] = x
        elif x.dtype.name in HALF:
            out[...] = (x.astype(np.float32) * np.float32(factor)).astype(x.dtype)
        elif x.dtype.kind in "fc":
            np.multiply(x, x.dtype.type(factor), out=out)
        else:
            out[...] = np.trunc(x.astype(np.float64) * factor).astype(x.dtype)

    def submitted(self, request: Request) -> None:
        pass

    def begin(self, requests: Sequence[Request]) -> None:
        pass

    def ended(self, requests: Sequence[Request]) -> None:
        pass

    def received(self, request: Request) -> None:
        pass


def dtype_named(name: Any) -> np.dtype[Any]:
    """Return NumPy's dtype; bfloat16 is that of ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        name = ml_dtypes.bfloat16
    made: np.dtype[Any] = np.dtype(name)
    return made
