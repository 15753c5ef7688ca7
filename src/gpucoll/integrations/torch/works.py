"""The works of torch: calls of a process group that were started."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Work as TorchWork

from gpucoll import GpucollError
from gpucoll.integrations.torch import completion
from gpucoll.integrations.torch.errors import as_torchs

_SOON_S = 50e-6
"""How long `get_future` polls for the end of a small call: less than the cost of handing it to a
thread and back (2 x 12 to 33 us)."""
_SMALL_BYTES = 64 << 10


class Started(Protocol):
    """A work of gpucoll."""

    def wait(self, timeout_s: float | None = None) -> object:
        """Wait until the call is done, or raise its error."""

    def done(self) -> bool:
        """Return whether the call has ended."""

    def exception(self) -> BaseException | None:
        """Return its error; None if there is none."""

    def add_done_callback(self, function: Callable[[object], object]) -> None:
        """Call ``function(work)`` when the call has ended."""


class Work(TorchWork):
    """A call that was started, or several that torch treats as one.

    Parameters
    ----------
    started : sequence
        gpucoll's works.
    outputs : list of tensor
        The value of the future.
    fill : callable, optional
        Fills the outputs that gpucoll could not write; called once when all works have succeeded.
    """

    def __init__(
        self,
        started: Sequence[Started],
        outputs: list[torch.Tensor],
        fill: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._started = started
        self._outputs = outputs
        self._fill = fill
        self._lock = threading.Lock()
        self._filled: torch.cuda.Event | None = None
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait until the call is done; for GPU tensors the current stream waits instead.

        Raises
        ------
        DistBackendError
            The call's error: one of `gpucoll.integrations.torch.errors`.
        """
        limit_s = seconds(timeout)
        try:
            for work in self._started:
                work.wait(limit_s)
        except GpucollError as error:
            raise as_torchs(error) from None
        self._finish()
        return True

    def synchronize(self) -> None:
        """Wait for the call, like `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait as `wait` does: the current stream for GPU tensors, this thread for others."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the call has ended. If it has succeeded, all outputs are filled."""
        if not all(work.done() for work in self._started):
            return False
        if self._fill is not None and self.exception() is None:
            self._fill_once()
        return self._filled is None or self._filled.query()

    def is_success(self) -> bool:
        """Return whether the call has succeeded."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the call's error; None while it runs or if it has succeeded."""
        for work in self._started:
            error = work.exception()
            if error is not None:
                return as_torchs(error) if isinstance(error, GpucollError) else error
        return None

    def add_done_callback(self, function: Callable[[Work], object]) -> None:
        """Call ``function(work)`` when the call has succeeded or failed. It must not wait."""

        def call() -> None:
            self.is_completed()  # fills the outputs
            function(self)

        completion.call_after(self._started, call)

    def result(self) -> list[torch.Tensor]:
        """Return the outputs."""
        return self._outputs

    def source_rank(self) -> int:
        """Return the rank that sent the message of a completed receive."""
        return int(self._started[0].message.source)  # type: ignore[attr-defined]

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the outputs; if the call fails, the future raises its error.

        For GPU tensors the future is complete at once, and the stream that takes its value waits,
        as with NCCL. For other tensors a separate thread completes the future and runs its
        callbacks, which may make further calls and wait for them.
        """
        if self._future is not None:
            return self._future
        device = self._gpu()
        devices = [] if device is None else [device]
        base: torch.futures.Future[None] = torch.futures.Future(devices=devices)
        # C++ does not treat an exception that Python sets on a future as an error and would read a
        # value. An exception raised in a callback is an error to it.
        self._future = base.then(self._value)
        if device is not None or self._ends_soon():
            base.set_result(None)
        else:
            completion.complete_after(self._started, base)
        return self._future

    def _value(self, _: object) -> list[torch.Tensor]:
        """Return the outputs, or raise the call's error.

        torch runs callbacks of GPU tensors on a stream from a pool. That stream waits for work that
        the future's value already has on GPUs (here there is none) and records the work that the
        callback's value must wait for. So this stream has to wait for the call.
        """
        self.wait()
        return self._outputs

    def _ends_soon(self) -> bool:
        if self.is_completed():
            return True
        if sum(t.numel() * t.element_size() for t in self._outputs) > _SMALL_BYTES:
            return False
        until = time.perf_counter() + _SOON_S
        while time.perf_counter() < until:
            if self.is_completed():
                return True
        return False

    def _finish(self) -> None:
        """Fill the outputs that gpucoll could not write, once; later callers wait for that."""
        if self._fill is None and self._filled is None:
            return
        if not self._fill_once() and self._filled is not None:
            torch.cuda.current_stream(self._gpu()).wait_event(self._filled)

    def _fill_once(self) -> bool:
        """Fill the outputs that gpucoll could not write; return False if they already were."""
        with self._lock:
            if (fill := self._fill) is None:
                return False
            fill()
            if (device := self._gpu()) is not None:
                self._filled = torch.cuda.current_stream(device).record_event()
            self._fill = None
            return True

    def _gpu(self) -> torch.device | None:
        """Return the GPU of the outputs; None if they are not on a GPU."""
        return next((x.device for x in self._outputs if x.is_cuda), None)


class Finished(Work):
    """A call that has succeeded: a blocking call, or one that had nothing to do."""

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        super().__init__((), outputs)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Return True."""
        return True


def seconds(timeout: datetime.timedelta | None) -> float | None:
    """Convert torch's timeout to seconds; None if it stands for no timeout (0, or negative)."""
    if timeout is None:
        return None
    given = timeout.total_seconds()
    return given if given > 0 else None
