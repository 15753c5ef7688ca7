"""How a message is checked and handed over, on the host and on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gpucoll.arrays.library import Destination, Template
from gpucoll.arrays.numpy_arrays import dtype_name as numpy_dtype_name
from gpucoll.arrays.operands import (
    destination_of,
    ensure_served,
    source_of,
    template_like,
    template_of,
)
from gpucoll.backends.protocol import HostBackend, MessageRequest
from gpucoll.calls.collected import check_in_group
from gpucoll.calls.dispatch import Dispatch
from gpucoll.calls.gpu.call import GpuCall
from gpucoll.calls.gpu.runner import GpuRunner
from gpucoll.calls.messages import MessageQueue
from gpucoll.calls.preparation import NOT_IN_GROUPS
from gpucoll.calls.shapes import parse_shape
from gpucoll.errors import ArgumentError, ArgumentTypeError, MismatchError
from gpucoll.group.protocol import Group
from gpucoll.transport.shared.layout import SentNumber
from gpucoll.transport.shared.words import Kind
from gpucoll.types import ANY_SOURCE, ANY_TAG, DTYPES, TAGS, dtype_name


class PointToPoint:
    """The messages of one communicator that the compiled entries have left to Python.

    Parameters
    ----------
    group : Group
        The ranks.
    host : HostBackend
        Moves host arrays.
    gpu : GpuRunner
        Makes calls on GPU arrays.
    dispatch : Dispatch
        Says which of them an array goes to.
    queue : MessageQueue
        Runs messages on the host in their turn.
    """

    def __init__(
        self,
        group: Group,
        host: HostBackend,
        gpu: GpuRunner,
        dispatch: Dispatch,
        queue: MessageQueue,
    ) -> None:
        self.queue = queue
        self.rank, self.world_size = group.rank, group.world_size
        self._group = group
        self._host = host
        self._gpu = gpu
        self._dispatch = dispatch

    def send(
        self, x: Any, dest: Any, tag: Any, async_op: bool, timeout_s: float | None, stream: Any
    ) -> Any:
        """Send x; a `Work` where that is asked for."""
        self._check_peer(dest, "dest")
        self._check_tag(tag)
        source = source_of(x)
        ensure_served(source.template)
        number = source.template.number
        request = MessageRequest(Kind.SEND, int(dest), int(tag), source.buffer, number)
        if self._dispatch.is_enqueued(source.template):
            call = self._gpu_call("send", [request], source.template, None, stream, timeout_s)
            call.is_own = not source.is_packed
            return self._gpu.call(call, async_op)
        if type(x) is np.ndarray:
            self._host.messages.learn(Kind.SEND, x.dtype, source.template.dtype)
        return self._deliver("send", [request], lambda: None, async_op, timeout_s)

    def recv(
        self,
        out: Any,
        source: Any,
        tag: Any,
        like: Any,
        shape: Any,
        dtype: Any,
        async_op: bool,
        timeout_s: float | None,
        stream: Any,
    ) -> Any:
        """Receive into `out`, or into a new array; a `Work` where that is asked for."""
        self._check_peer(source, "source", may_be_any=True)
        self._check_tag(tag, may_be_any=True)
        if out is None and like is None and shape is None and dtype is None:
            if async_op or self.queue.grouped is not None:
                raise ArgumentError(
                    "recv with async_op=True, or inside group(), needs out, like or shape and dtype"
                )
            message = self.probe(source, tag, True, timeout_s)
            assert message is not None
            source, tag, template = message.found_peer, message.found_tag, _template_of(message)
        elif out is not None:
            template = template_of(out, "out")
        else:
            lengths = None if shape is None else parse_shape(shape)
            template = template_like(lengths, dtype, like)
        destination = self._destination(template, out)
        request = MessageRequest(Kind.RECV, int(source), int(tag), destination.buffer)
        if self._dispatch.is_enqueued(template, "out"):
            call = self._gpu_call("recv", [request], template, destination, stream, timeout_s)
            call.is_own = out is not None and destination.lasting is out
            return self._gpu.call(call, async_op, _in_group(destination))
        if type(out) is np.ndarray:
            self._host.messages.learn(Kind.RECV, out.dtype, template.dtype)
        return self._deliver(
            "recv", [request], destination.finish, async_op, timeout_s, _in_group(destination)
        )

    def send_recv(
        self,
        x: Any,
        dest: Any,
        source: Any,
        out: Any,
        tag: Any,
        async_op: bool,
        timeout_s: float | None,
        stream: Any,
    ) -> Any:
        """Send x and receive into `out`, or into a new array like x, both at once."""
        self._check_peer(dest, "dest")
        self._check_peer(source, "source", may_be_any=True)
        self._check_tag(tag)
        given = source_of(x)
        template = given.template if out is None else template_of(out, "out")
        ensure_served(given.template)
        destination = self._destination(template, out, x)
        if template.device != given.template.device:
            raise ArgumentError(f"out lies on {template.device}, x on {given.template.device}")
        requests = [
            MessageRequest(Kind.RECV, int(source), int(tag), destination.buffer),
            MessageRequest(Kind.SEND, int(dest), int(tag), given.buffer, given.template.number),
        ]
        if self._dispatch.is_enqueued(template):
            name = "send_recv"
            call = self._gpu_call(name, requests, template, destination, stream, timeout_s)
            has_out = out is not None and destination.lasting is out
            call.is_own = has_out and not given.is_packed
            return self._gpu.call(call, async_op, _in_group(destination))
        for array in (x, out):
            if type(array) is np.ndarray:
                self._host.messages.learn(Kind.RECV, array.dtype, numpy_dtype_name(array.dtype))
        return self._deliver(
            "send_recv", requests, destination.finish, async_op, timeout_s, _in_group(destination)
        )

    def finish_send_recv(self, x: Any, dest: int, source: int, out: Any, tag: int) -> Any:
        """Finish a send_recv that the compiled entry has begun: nothing is sent a second time."""
        requests = [
            MessageRequest(Kind.RECV, source, tag, source_of(out).buffer),
            MessageRequest(Kind.SEND, dest, tag, source_of(x).buffer),
        ]
        self._host.messages.resume(requests)
        if requests[0].is_misfit:
            raise self._misfit(requests[0])
        return out

    def probe(
        self, source: Any, tag: Any, wait: bool, timeout_s: float | None
    ) -> MessageRequest | None:
        """Return the message that a receive would get; None: there is none yet."""
        self._check_peer(source, "source", may_be_any=True)
        self._check_tag(tag, may_be_any=True)
        request = MessageRequest(Kind.PROBE, int(source), int(tag))
        if self.queue.grouped is not None:
            check_in_group(self.queue.grouped, "probe", False, NOT_IN_GROUPS)
        if wait:
            self._deliver("probe", [request], lambda: None, False, timeout_s)
            return request
        self._group.check_open()
        self._group.raise_if_aborted()
        return request if self._host.messages.look(request) else None

    # --- what they have in common -----------------------------------------------------------------

    def _gpu_call(
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

        return self.queue.deliver(name, requests, checked, async_op, timeout_s, lasting)

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


def _in_group(destination: Destination) -> Any:
    """Return what a receive inside a group returns."""
    return NOT_IN_GROUPS if destination.lasting is None else destination.lasting


def _template_of(message: MessageRequest) -> Template:
    """Return what a message that was found is as an array, where that can be told."""
    name = dtype_name(message.found_dtype)
    if name not in DTYPES or message.found_shape is None:
        raise ArgumentError(
            f"recv cannot tell what rank {message.found_peer} has sent ({message.found_bytes} "
            f"bytes of {name}): give out, or shape and dtype"
        )
    return template_like(message.found_shape, name)._replace(number=number_type_of(message))


def number_type_of(message: MessageRequest) -> type | None:
    """Return the type of the number that a probe found; None for an array."""
    if message.found_number is None:
        return None
    name = dtype_name(message.found_dtype)
    if message.found_number == SentNumber.PYTHON:
        return _PYTHON_TYPES[name]
    try:
        return np.dtype(name).type
    except TypeError:  # a bfloat16, where ml_dtypes is not imported; or none that has a name here
        return np.generic


_PYTHON_TYPES: Mapping[str, type] = {
    "bool": bool,
    "int64": int,
    "uint64": int,
    "float64": float,
    "complex128": complex,
}
