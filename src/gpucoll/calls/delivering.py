"""How a message is checked and handed over, on the host and on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpucoll.arrays.library import Destination, Template
from gpucoll.arrays.operands import destination_of, ensure_served
from gpucoll.backends.protocol import MessageRequest
from gpucoll.calls.calling import Calling
from gpucoll.calls.gpu.call import GpuCall
from gpucoll.calls.messages import MessageQueue
from gpucoll.calls.preparation import NOT_IN_GROUPS
from gpucoll.errors import ArgumentError, ArgumentTypeError, MismatchError
from gpucoll.types import ANY_SOURCE, ANY_TAG, TAGS, dtype_name


class Delivering(Calling):
    """The part of `Communicator` that its messages stand on."""

    _message_queue: MessageQueue

    def _gpu_message(
        self,
        name: str,
        requests: list[MessageRequest],
        template: Template,
        destination: Destination | None,
        stream: Any,
        timeout_s: float | None,
    ) -> GpuCall:
        """Return messages of GPU arrays as one call."""
        for request in requests:
            if request.peer == ANY_SOURCE or request.tag == ANY_TAG:
                raise ArgumentError(
                    f"{name} of GPU arrays must name its source and tag: the vendor's library "
                    "matches messages by rank and order alone, and cannot say which has come. "
                    "Send the choice as a host array first"
                )
            if request.peer == self.rank and len(requests) == 1 and self._gpu.grouped is None:
                raise ArgumentError(
                    f"{name} of GPU arrays to or from this rank itself would wait for ever: use "
                    "send_recv or group()"
                )
        finish = (lambda: None) if destination is None else destination.finish
        return GpuCall(
            name, template, finish, messages=requests, stream=stream, timeout_s=timeout_s
        )

    def _deliver(
        self,
        name: str,
        requests: list[MessageRequest],
        finish: Callable[[], Any],
        async_op: bool,
        timeout_s: float | None,
        lasting: Any = None,
    ) -> Any:
        """Hand requests to the queue of messages: run now, in their turn, or with others."""

        def checked() -> Any:
            for request in requests:
                if request.is_misfit:
                    raise self._misfit(request)
            return finish()

        return self._message_queue.deliver(name, requests, checked, async_op, timeout_s, lasting)

    def _misfit(self, request: MessageRequest) -> MismatchError:
        buffer = request.buffer
        assert buffer is not None
        what = f"{request.found_bytes} bytes of {dtype_name(request.found_dtype)}"
        if request.found_shape is not None:
            what = f"{dtype_name(request.found_dtype)}, shape {request.found_shape}"
        return MismatchError(
            f"recv on rank {self.rank} of {self.world_size}: the message from rank "
            f"{request.found_peer} with tag {request.found_tag} is {what}, but out is "
            f"{buffer.dtype}, shape {buffer.shape}. The message stays: receive it into an array "
            "that fits (probe says which), or with neither out nor shape"
        )

    def _destination(self, template: Template, out: Any, x: Any = None) -> Destination:
        ensure_served(template, "x" if out is None else "out")
        return destination_of(template, template.shape, out, x=x, in_place_at=None)

    def _check_peer(self, peer: Any, name: str, may_be_any: bool = False) -> None:
        if isinstance(peer, bool) or not isinstance(peer, int | np.integer):
            raise ArgumentTypeError(f"{name} must be a rank, an int; got {peer!r}")
        if not (0 <= peer < self.world_size or (may_be_any and peer == ANY_SOURCE)):
            anyone = " or ANY_SOURCE" if may_be_any else ""
            raise ArgumentError(f"{name} must be in 0..{self.world_size - 1}{anyone}; got {peer}")

    def _check_tag(self, tag: Any, may_be_any: bool = False) -> None:
        if isinstance(tag, bool) or not isinstance(tag, int | np.integer):
            raise ArgumentTypeError(f"tag must be an int; got {tag!r}")
        if not (0 <= tag < TAGS or (may_be_any and tag == ANY_TAG)):
            anything = " or ANY_TAG" if may_be_any else ""
            raise ArgumentError(f"tag must be in 0..{TAGS - 1}{anything}; got {tag}")


def in_group(destination: Destination) -> Any:
    """Return what a receive inside a group returns."""
    return NOT_IN_GROUPS if destination.lasting is None else destination.lasting
