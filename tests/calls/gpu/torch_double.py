"""PyTorch's streams and futures over a double of the driver, for tensors in the double's memory.

As far as works of calls use them. Streams are ordered as by PyTorch's own futures:

- a future's value brings an event of the stream that is current when it is set, if it has tensors;
- a callback runs on a fresh stream, which waits for that event and for nothing else;
- the value that a callback returns brings an event of the callback's stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.calls.gpu import cupy_double

from gpucoll.devices import Device, open_device

_LIMIT_S = 20.0


class Event:
    """``torch.cuda.Event``, recorded."""

    def __init__(self, device: Device, handle: int) -> None:
        self._device, self.handle = device, handle

    def query(self) -> bool:
        with self._device:
            return self._device.is_event_done(self.handle)


class Stream:
    """``torch.cuda.Stream``: a stream of the double."""

    def __init__(self, device: Device, number: int) -> None:
        self._device, self.cuda_stream = device, number

    def record_event(self) -> Event:
        with self._device:
            event = self._device.create_event()
            assert self._device.record_event(event, self.cuda_stream) == 0
        return Event(self._device, event)

    def wait_event(self, event: Event) -> None:
        with self._device:
            assert self._device.stream_wait_event(self.cuda_stream, event.handle, 0) == 0

    def synchronize(self) -> None:
        with self._device:
            self._device.synchronize_stream(self.cuda_stream)


class Torch:
    """What stands in a rank for PyTorch's functions, once `install` has put it there."""

    def __init__(self, kind: str, number: int) -> None:
        self.device = open_device(kind, number)

    def current_stream(self, device: object = None) -> Stream:
        """``torch.cuda.current_stream``."""
        number = cupy_double.get_current_stream(self.device.number).ptr
        return Stream(self.device, number)

    def future(self, *, devices: Any = ()) -> Future:
        """``torch.futures.Future``."""
        return Future(self, bool(devices))

    def install(self, patch: Any, torch: Any) -> None:
        """Take these, and tensors of the host for tensors on a GPU, while the patch lasts."""
        patch.setattr(torch.cuda, "current_stream", self.current_stream)
        patch.setattr(torch.futures, "Future", self.future)
        patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))


class Future:
    """``torch.futures.Future``, of values on the GPU if `is_on_gpu`."""

    def __init__(self, torch: Torch, is_on_gpu: bool) -> None:
        self._torch, self._is_on_gpu = torch, is_on_gpu
        self._done = threading.Event()
        self._callbacks: list[Callable[[], None]] = []
        self._event: Event | None = None
        self._value: Any = None
        self._error: BaseException | None = None

    def set_result(self, value: Any) -> None:
        if self._is_on_gpu and _has_tensors(value):
            self._event = self._torch.current_stream().record_event()
        self._value = value
        self._complete()

    def then(self, callback: Callable[[Future], Any]) -> Future:
        child = Future(self._torch, self._is_on_gpu)

        def run() -> None:
            with cupy_double.Stream():  # a fresh one
                self._wait_on_the_current_stream()
                try:
                    value = callback(self)
                except Exception as error:
                    child._error = error
                    child._complete()
                else:
                    child.set_result(value)

        if self.done():
            run()
        else:
            self._callbacks.append(run)
        return child

    def done(self) -> bool:
        return self._done.is_set()

    def value(self) -> Any:
        assert self.done()
        if self._error is not None:
            raise self._error
        return self._value

    def wait(self) -> Any:
        assert self._done.wait(_LIMIT_S)
        self._wait_on_the_current_stream()
        return self.value()

    def _complete(self) -> None:
        self._done.set()
        for callback in self._callbacks:
            callback()

    def _wait_on_the_current_stream(self) -> None:
        if self._event is not None:
            self._torch.current_stream().wait_event(self._event)


def _has_tensors(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_has_tensors(one) for one in value)
    return hasattr(value, "data_ptr")
