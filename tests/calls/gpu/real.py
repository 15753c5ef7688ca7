"""What tests do with a real GPU that doubles do by settings: hold a stream, capture a graph."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

HOLD_LIMIT_S = 20.0
"""After this long a stream goes on, whatever the test does."""

HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@contextmanager
def held(stream: int) -> Iterator[None]:
    """Let a stream not go on within the block: what is enqueued on it waits.

    A function on the host, enqueued by ``cuLaunchHostFunc``, waits for the end of the block. What
    the driver does with the whole GPU (load a kernel for the first time, free memory) would wait
    too: let the test make such calls once before.
    """
    end = threading.Event()
    wait = HOST_FUNCTION(lambda _: end.wait(HOLD_LIMIT_S) and None)
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc
    launch.argtypes = [ctypes.c_void_p, HOST_FUNCTION, ctypes.c_void_p]
    assert launch(stream, wait, None) == 0
    _kept.append(wait)  # the driver calls it, perhaps after the block
    try:
        yield
    finally:
        end.set()


_kept: list[Any] = []


class CupyGraph:
    """What CuPy captures on a stream."""

    code = 0

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> CupyGraph:
        self._stream.begin_capture()
        return self

    def __exit__(self, *exception: object) -> None:
        self._graph = self._stream.end_capture()

    def launch(self, stream: Any) -> None:
        self._graph.launch(stream)

    def close(self) -> None:
        del self._graph


class TorchGraph:
    """What PyTorch captures on its current stream; its mode guards against calls of all threads."""

    code = 0

    def __init__(self, torch: Any) -> None:
        self._torch, self._graph = torch, torch.cuda.CUDAGraph()

    def __enter__(self) -> TorchGraph:
        self._graph.capture_begin(capture_error_mode="global")
        return self

    def __exit__(self, *exception: object) -> None:
        self._graph.capture_end()

    def launch(self, stream: Any) -> None:
        with stream:
            self._graph.replay()

    def close(self) -> None:
        self._graph.reset()
