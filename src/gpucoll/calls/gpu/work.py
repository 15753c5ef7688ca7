"""The Work of a call on GPU arrays, which runs on a stream, not in a thread."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpucoll.arrays import torch_compiler
from gpucoll.backends.gpu.deferred_release import settle
from gpucoll.calls.work import Work
from gpucoll.errors import GpucollError, StateError

if TYPE_CHECKING:
    from gpucoll.backends.gpu.in_flight import IssuedCall
    from gpucoll.backends.gpu.issuer import Issuer
    from gpucoll.calls.given import AnyResult


class GpuWork(Work[Any]):
    """A call on GPU arrays that was started with ``async_op=True``.

    `wait` makes the current stream of the arrays' library wait, and returns at once: work that is
    issued on that stream afterwards sees the result. Only `synchronize` certifies success.

    After the communicator's `close`, which waits for all calls, it reports how this call ended. If
    the communicator was given up or dropped before that was known, its error is a StateError.
    """

    def __init__(
        self,
        issuer: Issuer,
        issued: IssuedCall,
        finish: Callable[[], object],
        current_stream: Callable[[], int],
        *,
        must_complete: bool,
        is_issued: bool = True,
    ) -> None:
        # It needs nothing of a queue except the lock of its callbacks.
        self._finish: Callable[[], Any] | None = finish
        self._name = issued.name
        self._result = None
        self._error = None
        self._callbacks = None
        self._process = os.getpid()
        self._issuer = issuer
        self._issued = issued
        self._current_stream = current_stream
        self._must_complete = must_complete
        self._is_issued = is_issued

    def begin(self, issued: IssuedCall) -> None:
        """Take the call that the end of the group has issued."""
        self._issued, self._is_issued = issued, True

    def wait(self, timeout_s: float | None = None) -> AnyResult:
        """Make the current stream wait for the call, and return its result.

        This thread does not wait, except for arrays of a library without stream order (JAX).

        Parameters
        ----------
        timeout_s : float, optional
            For those arrays only: how long to wait, in seconds.
        """
        self._check_usable()
        if not (self._issuer.is_over and self._issued.is_done):
            self._issuer.raise_failure()
            if self._must_complete:
                self._issuer.synchronize(self._issued, timeout_s)
            else:
                self._issuer.wait_on(self._current_stream(), self._issued)
        if (finish := self._finish) is not None:
            self._finish = None  # releases the arrays
            try:
                self._result = finish()
            except BaseException as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._result

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait until the call has succeeded on the GPU and was the same on every rank.

        Parameters
        ----------
        timeout_s : float, optional
            How long to wait here, in seconds. The call has its own deadline, which begins with its
            start on the stream. By default, earlier work on the stream has as long to end.
        """
        self._check_usable()
        self._issuer.synchronize(self._issued, timeout_s)
        settle()

    def done(self) -> bool:
        """Return whether the call has ended, well or not. Does not wait."""
        self._look()
        return self._issued.is_done or self._issuer.failure is not None

    def exception(self) -> BaseException | None:
        """Return the call's error; None if there is none or the call still runs. Does not wait."""
        self._look()
        if self._issued.is_done or self._issuer.failure is None:
            return None
        self._issuer.group.was_told = True
        return self._issuer.failure

    def add_done_callback(self, function: Callable[[Work[AnyResult]], object]) -> None:
        """Call ``function(work)`` when the call has ended, as every Work does."""
        self._check_issued()
        super().add_done_callback(function)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the call has ended, as every Work does."""
        self._check_issued()
        return super().fileno()

    def _has_ended(self) -> bool:
        return self.done()

    def _watch(self) -> None:
        """Let a thread wait for the end of the call, which the driver does not report."""

        def wait() -> None:
            with contextlib.suppress(GpucollError):  # the Work's owner gets the error
                self._issuer.synchronize(self._issued)
            self.call_back()

        threading.Thread(target=wait, name="gpucoll-callbacks", daemon=True).start()

    def _look(self) -> None:
        """Look whether the call has ended, unless that is known."""
        if not self._issued.is_done:
            self._check_usable()  # in a child the lock may be held for ever
            self._issuer.look()

    def _check_usable(self) -> None:
        if os.getpid() != self._process:
            raise StateError(f"{self._name} belongs to the process that this one was forked from")
        self._check_issued()

    def _check_issued(self) -> None:
        if not self._is_issued:
            raise StateError(
                f"{self._name} has not started: it starts at the end of its group(async_op=True), "
                "unless that block raises an error"
            )

    def __repr__(self) -> str:
        if self._issued.is_done:
            return f"<Work {self._name} on the GPU: done>"
        if self._issuer.failure is not None:
            return f"<Work {self._name} on the GPU: failed: {type(self._issuer.failure).__name__}>"
        return f"<Work {self._name} on the GPU: not done>"


torch_compiler.keep_out_of(GpuWork)
torch_compiler.tell_torch()
