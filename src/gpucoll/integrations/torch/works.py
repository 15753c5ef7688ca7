"""What torch calls a Work: a call of a process group that was started."""

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
"""How long `get_future` looks whether a small call ends: less than handing it to a thread costs,
with the thread's way back (2 x 12 to 33 us)."""
_SMALL_BYTES = 64 << 10


class Started(Protocol):
    """A work of gpucoll."""

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait until the call is done, or raise its error."""

    def done(self) -> bool:
        """Return whether it has ended."""

    def exception(self) -> BaseException | None:
        """Return its error."""


class Work(TorchWork):
    """A call that was started, or several that torch counts as one.

    Parameters
    ----------
    started : sequence
        Works of gpucoll.
    outputs : list of tensor
        The value of the future.
    fill : callable, optional
        Called once when all have succeeded: fills outputs through which gpucoll could not write.
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
            What became of the call: one of `gpucoll.integrations.torch.errors`.
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
        """As `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """As `wait`: on GPU tensors the current stream waits; else this thread."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the call has ended, well or not; if well, all outputs are there."""
        if not all(work.done() for work in self._started):
            return False
        if self._fill is not None and self.exception() is None:
            self._fill_once()
        return self._filled is None or self._filled.query()

    def is_success(self) -> bool:
        """Return whether it has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return its error; None while it runs or where it went well."""
        for work in self._started:
            error = work.exception()
            if error is not None:
                return as_torchs(error) if isinstance(error, GpucollError) else error
        return None

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        """Call ``function(work)`` when the call has ended, well or not; it must not wait."""

        def call() -> None:
            self.is_completed()  # fills
            function(self)

        completion.call_after(self._started, call)

    def result(self) -> list[torch.Tensor]:
        """Return the outputs."""
        return self._outputs

    def source_rank(self) -> int:
        """Return from whom the message came; that of a receive that has ended."""
        return int(self._started[0].message.source)  # type: ignore[attr-defined]

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future of the outputs: a failure is its exception.

        For GPU tensors it is complete at once, and whoever takes its value waits by its stream, as
        with NCCL. Else a thread of its own completes it, in which callbacks run, that may make
        further calls and wait for them.
        """
        if self._future is not None:
            return self._future
        device = self._gpu()
        devices = [] if device is None else [device]
        base: torch.futures.Future[None] = torch.futures.Future(devices=devices)
        # An exception set on a future by Python is no error to C++, which would read a value: it is
        # one where a callback raises.
        self._future = base.then(self._value)
        if device is not None or self._ends_soon():
            base.set_result(None)
        else:
            completion.complete_after(self._started, base)
        return self._future

    def _value(self, _: object) -> list[torch.Tensor]:
        """Return the outputs, or raise the call's error.

        torch runs callbacks of GPU tensors on a stream out of a pool, which waits for what a value
        already has on GPUs, here nothing, and records what the callback's value waits for. So it
        is that stream that must wait for the call.
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
        """Fill what gpucoll could not write, once; whoever waits later comes behind that."""
        if self._fill is None and self._filled is None:
            return
        if not self._fill_once() and self._filled is not None:
            torch.cuda.current_stream(self._gpu()).wait_event(self._filled)

    def _fill_once(self) -> bool:
        """Fill what gpucoll could not write; return whether that had not been done before."""
        with self._lock:
            if (fill := self._fill) is None:
                return False
            fill()
            if (device := self._gpu()) is not None:
                self._filled = torch.cuda.current_stream(device).record_event()
            self._fill = None
            return True

    def _gpu(self) -> torch.device | None:
        """Return on which GPU the outputs are; None: on none."""
        return next((x.device for x in self._outputs if x.is_cuda), None)


class Finished(Work):
    """A call that has ended well: what a blocking one returns, and one that had nothing to do."""

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        super().__init__((), outputs)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Return True."""
        return True


def seconds(timeout: datetime.timedelta | None) -> float | None:
    """Return a timeout of torch's in seconds; None where it stands for none (0, or negative)."""
    if timeout is None:
        return None
    given = timeout.total_seconds()
    return given if given > 0 else None
