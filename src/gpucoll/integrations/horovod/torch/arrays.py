"""Torch tensors, as the engine sees them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from gpucoll.integrations.horovod.engine.request import Request

__all__ = ["DTYPES", "TORCH", "TorchArrays"]

_NAMES = (
    *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "bool"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
DTYPES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in _NAMES if hasattr(torch, name)
}
_HALF = (torch.float16, torch.bfloat16)


class TorchArrays:
    """An `ArrayLibrary` of tensors on the host and on GPUs.

    Every call of a GPU tensor is ordered on streams: the engine's behind that of the thread which
    submitted the request, and the stream of the thread which takes the results behind the
    engine's. No thread waits for a GPU.
    """

    name = "torch"
    gpu: int | None = None
    """Where zeros for GPUs are made; None: on torch's current GPU."""

    def dtype(self, x: Any) -> str:
        return DTYPES[x.dtype]

    def look(self, x: Any) -> Hashable:
        return x.dtype, x.shape, x.is_cuda

    def device(self, x: Any) -> str:
        return "GPU" if x.is_cuda else "CPU"

    def zeros(self, dtype: str, shape: tuple[int, ...], device: str) -> Any:
        where = "cpu" if device == "CPU" else torch.device("cuda", self.gpu)
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=where)

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        return like.new_empty(shape)

    def scale(self, x: Any, factor: float, out: Any) -> None:
        with torch.inference_mode():  # tensors may be of a program that is in it
            if factor == 1.0:
                out.copy_(x)
            elif x.dtype in _HALF:
                out.copy_(x.float().mul_(factor))
            elif x.dtype.is_floating_point or x.dtype.is_complex:
                torch.mul(x, factor, out=out)
            else:
                out.copy_(x.double().mul_(factor).trunc_())

    def submitted(self, request: Request) -> None:
        if request.arrays and request.arrays[0].is_cuda:
            request.notes = _event(request.arrays[0].device)

    def begin(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.notes is not None:
                _wait(request.notes, request.arrays[0].device)

    def ended(self, requests: Sequence[Request]) -> None:
        if requests[0].arrays and requests[0].arrays[0].is_cuda:
            event = _event(requests[0].arrays[0].device)
            for request in requests:
                request.notes = event, torch.cuda.current_stream(request.arrays[0].device)

    def received(self, request: Request) -> None:
        if request.notes is None or request.error is not None:
            return
        event, made_on = request.notes
        stream = torch.cuda.current_stream(request.arrays[0].device)
        if stream != made_on:
            stream.wait_event(event)
            for x in request.results or ():  # their memory was allocated for the engine's stream
                x.record_stream(stream)


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _wait(event: torch.cuda.Event, device: torch.device) -> None:
    torch.cuda.current_stream(device).wait_event(event)


TORCH = TorchArrays()
