"""Messages on the host and on GPUs: they are checked here and handed over to run."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from gpucoll.arrays.array_kinds import numpy_view
from gpucoll.arrays.library import AnyDtype, AnyStream, Destination, Source, Template
from gpucoll.arrays.numpy_arrays import dtype_name as numpy_dtype_name
from gpucoll.arrays.operands import (
    destination_of,
    ensure_served,
    source_of,
    template_like,
    template_of,
)
from gpucoll.backends.protocol import HostBackend, MessageRequest, Transfers
from gpucoll.calls.begun_message import begun
from gpucoll.calls.collected import check_in_group
from gpucoll.calls.dispatch import Dispatch
from gpucoll.calls.given import AnyInput, AnyResult, Unchecked
from gpucoll.calls.gpu.runner import GpuRunner
from gpucoll.calls.message import (
    OBJECT,
    OBJECT_CODE,
    Message,
    array_message,
    described_dtype,
    description_of,
    message_of,
    name_of,
    number_type_of,
    object_message,
    received_message,
)
from gpucoll.calls.message_errors import (
    check_peer,
    check_tag,
    expired_error,
    gone_error,
    misfit_error,
    no_object_error,
    untold_error,
)
from gpucoll.calls.message_objects import (
    OBJECT_DTYPE,
    OBJECT_ROW,
    Bytes,
    new_parts,
    object_of,
    object_requests,
    pickled,
)
from gpucoll.calls.message_work import MessageWork, Steps
from gpucoll.calls.messages import MessageQueue
from gpucoll.calls.plan import Plan
from gpucoll.calls.preparation import NOT_IN_GROUPS
from gpucoll.calls.shapes import parse_shape
from gpucoll.errors import ArgumentError
from gpucoll.group.protocol import Group
from gpucoll.transport.shared.words import Kind, Mode, Status
from gpucoll.types import ANY_SOURCE, ANY_TAG, DTYPES, dtype_name

if TYPE_CHECKING:
    from gpucoll.calls.gpu.call import GpuCall

_LEFT_TO_PYTHON = int(Status.NOT_RUN), int(Status.MISFIT)
"""The statuses of a plan that leaves a message to Python."""


class PointToPoint:
    """The messages of one communicator that compiled entries have left to Python.

    Parameters
    ----------
    group : Group
        The ranks.
    host : HostBackend
        Moves host arrays.
    gpu : GpuRunner
        Makes calls on GPU arrays.
    dispatch : Dispatch
        Decides whether an array goes to the host backend or to the GPUs.
    """

    def __init__(self, group: Group, host: HostBackend, gpu: GpuRunner, dispatch: Dispatch) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        self._group = group
        self._messages = host.messages
        self._gpu = gpu
        self._dispatch = dispatch
        self.queue = MessageQueue(group, host.messages, self._check_begun)

    # --- sending ----------------------------------------------------------------------------------

    def send(
        self,
        x: AnyInput,
        dest: Unchecked,
        tag: Unchecked,
        async_op: bool,
        timeout_s: float | None,
        stream: AnyStream,
        synchronous: bool = False,
    ) -> AnyResult:
        """Send x; return a `Work` if `async_op` is true."""
        check_peer(dest, "dest", self.world_size)
        check_tag(tag)
        source = source_of(x)
        ensure_served(source.template)
        request = self._send_request(source, dest, tag)
        if self._dispatch.is_enqueued(source.template):
            if synchronous:
                raise ArgumentError(
                    "synchronous=True is for host arrays (and not with mixed=True): a send of GPU "
                    "arrays completes when its stream has passed it"
                )
            call = self._gpu_call("send", [request], source.template, None, stream, timeout_s)
            call.is_own = not source.is_packed
            return self._gpu.call(call, async_op)
        if type(x) is np.ndarray:
            self._learn(Kind.SEND, x.dtype)
        request.mode = Mode.SYNCHRONOUS if synchronous else 0
        return self.queue.deliver("send", self._sending([request]), async_op, timeout_s)

    def send_object(
        self,
        value: object,
        dest: Unchecked,
        tag: Unchecked,
        async_op: bool,
        timeout_s: float | None,
        synchronous: bool,
    ) -> AnyResult:
        """Send a Python object; return a `Work` if `async_op` is true."""
        check_peer(dest, "dest", self.world_size)
        check_tag(tag)
        self._dispatch.check_host()
        first, buffers = pickled(value, self.rank, self.world_size)
        if not buffers and not synchronous and timeout_s is None:
            if async_op:
                row = self._messages.begin_send(first, dest, tag)
                if row is not None:
                    return begun(self.queue, "send_object", row, None)
            else:
                sent = self._messages.send(first, dest, tag, None)
                if sent is not None:
                    return None if sent is first else self.raise_failed(sent)
            self._messages.learn(Kind.SEND, OBJECT_DTYPE, OBJECT, None)
        requests = object_requests(first, buffers, int(dest), int(tag))
        requests[0].mode = Mode.SYNCHRONOUS if synchronous else 0
        steps = self._sending(requests)
        return self.queue.deliver("send_object", steps, async_op, timeout_s, NOT_IN_GROUPS)

    def _sending(self, requests: list[MessageRequest]) -> Steps:
        yield requests
        for request in requests:
            if request.error is not None:
                raise request.error

    def _send_request(self, source: Source, dest: Unchecked, tag: Unchecked) -> MessageRequest:
        template = source.template
        description = None
        if template.dtype not in DTYPES and isinstance(template.native, np.dtype):
            description = description_of(template.native, template.dtype)
        return MessageRequest(
            Kind.SEND, int(dest), int(tag), source.buffer, template.number, 0, description
        )

    # --- receiving --------------------------------------------------------------------------------

    def recv(
        self,
        out: AnyInput,
        source: Unchecked,
        tag: Unchecked,
        like: AnyInput,
        shape: Unchecked,
        dtype: AnyDtype,
        async_op: bool,
        timeout_s: float | None,
        stream: AnyStream,
        info: bool = False,
    ) -> AnyResult:
        """Receive into `out` or a new array; return a `Work` if `async_op` is true."""
        check_peer(source, "source", self.world_size, may_be_any=True)
        check_tag(tag, may_be_any=True)
        if out is None and like is None and shape is None and dtype is None:
            self._dispatch.check_host("out")
            if self._dispatch.enqueues_host:
                raise ArgumentError(
                    "recv with mixed=True must describe the message, as for GPU arrays: give out=, "
                    "like=, or shape= and dtype=; or use send_object and recv_object"
                )
            request = MessageRequest(Kind.TAKE, int(source), int(tag))
            steps = self._taking(request, info)
            return self.queue.deliver("recv", steps, async_op, timeout_s, MessageWork)
        if out is not None:
            template = template_of(out, "out")
        else:
            lengths = None if shape is None else parse_shape(shape)
            template = template_like(lengths, dtype, like)
        destination = self._destination(template, out)
        request = MessageRequest(Kind.RECV, int(source), int(tag), destination.buffer)
        if self._dispatch.is_enqueued(template, "out"):
            if info:
                raise ArgumentError(
                    "info=True is for host arrays (and not with mixed=True): a receive of GPU "
                    "arrays already names its source and tag"
                )
            call = self._gpu_call("recv", [request], template, destination, stream, timeout_s)
            call.is_own = out is not None and destination.lasting is out
            return self._gpu.call(call, async_op, _in_group(destination))
        shown = out if type(out) is np.ndarray else numpy_view(out)
        if shown is not None:
            self._learn(Kind.RECV, shown.dtype)
        steps = self._receiving(request, destination, out, info)
        in_group = MessageWork if info else _in_group(destination)
        return self.queue.deliver("recv", steps, async_op, timeout_s, in_group)

    def receive_informed(self, row: bytearray, out: AnyInput) -> tuple[AnyResult, Message]:
        """Return `out` and the Message of the receive that an entry has run; or raise its error."""
        plain = self._messages.plain_array(row)
        if plain is not None:
            return out, array_message(*plain, None)
        request = self._messages.ended(row)
        request.buffer = source_of(out, "out").buffer
        self._check(request)
        return out, received_message(request)

    def receive_taken(self, row: bytearray) -> AnyResult:
        """Receive the message that a compiled entry has taken, into a new array."""
        out = self._messages.receive_taken(row)
        if out is not None:
            return out
        request = self._messages.ended(row)
        return self.queue.run(self._taken(request, False))

    def _check_begun(self, work: MessageWork[object]) -> None:
        """Raise the error of a `BegunMessage`, if it has failed."""
        transfers = work._transfers
        for request in transfers.requests if transfers is not None else ():
            if request.is_misfit:
                request.buffer = source_of(work._result).buffer
            self._check(request)

    def recv_object(
        self, source: Unchecked, tag: Unchecked, async_op: bool, timeout_s: float | None, info: bool
    ) -> AnyResult:
        """Receive a Python object; return a `Work` if `async_op` is true."""
        check_peer(source, "source", self.world_size, may_be_any=True)
        check_tag(tag, may_be_any=True)
        self._dispatch.check_host("out")
        if not async_op and timeout_s is None:
            row = self._messages.take(source, tag, None)
            if row is not None:
                return self._receive_taken_object(row, info)
        request = MessageRequest(Kind.TAKE, int(source), int(tag))
        steps = self._taking_object(request, info)
        return self.queue.deliver("recv_object", steps, async_op, timeout_s, NOT_IN_GROUPS)

    def receive_message(
        self, message: Message, out: AnyInput, async_op: bool, timeout_s: float | None
    ) -> AnyResult:
        """Receive exactly the message that a probe has found."""
        place = message._place
        steps: Steps
        if out is not None:
            template = template_of(out, "out")
            destination = self._destination(template, out)
            request = MessageRequest(
                Kind.RECV, message.source, message.tag, destination.buffer, place=place
            )
            steps = self._receiving(request, destination, out, False)
            in_group = _in_group(destination)
        else:
            request = MessageRequest(Kind.TAKE, message.source, message.tag, place=place)
            is_object = message.dtype == "object"
            steps = (
                self._taking_object(request, False) if is_object else self._taking(request, False)
            )
            in_group = NOT_IN_GROUPS if is_object else MessageWork
        return self.queue.deliver("recv", steps, async_op, timeout_s, in_group)

    def _receiving(
        self, request: MessageRequest, destination: Destination, out: AnyInput, info: bool
    ) -> Steps:
        buffer = destination.buffer
        if out is not None and destination.lasting is None and buffer.count:
            # Elements that the message does not fill stay unchanged.
            template_of(out, "out").library.complete(buffer.owner, out)
        yield [request]
        self._check(request)
        if request.found_bytes < buffer.size_bytes and out is None:
            left = buffer.size_bytes - request.found_bytes
            ctypes.memset(buffer.address + request.found_bytes, 0, left)
        result = destination.finish()
        return (result, received_message(request)) if info else result

    def _taking(self, request: MessageRequest, info: bool) -> Steps:
        yield [request]
        return (yield from self._taken(request, info))

    def _taken(self, request: MessageRequest, info: bool) -> Steps:
        self._check(request)
        try:
            template = _template_of(request)
            destination = destination_of(template, template.shape)
        except BaseException:
            self._messages.let_go(request)
            raise
        yield [self._rest_of(request, destination)]
        result = destination.finish()
        return (result, received_message(request)) if info else result

    def _taking_object(self, request: MessageRequest, info: bool) -> Steps:
        yield [request]
        return (yield from self._taken_object(request, info))

    def _receive_taken_object(self, row: bytearray, info: bool) -> AnyResult:
        """Receive the object that a compiled entry has taken."""
        first = self._messages.receive_taken(row, OBJECT_CODE)
        if first is None:
            request = self._messages.ended(row)
            return self.queue.run(self._taken_object(request, info))
        data, parts = new_parts(first)
        if not parts:
            value = object_of(data, parts)
            return (value, object_message(*self._messages.origin(row))) if info else value
        return self.queue.run(self._opened(first, self._messages.ended(row), info))

    def _taken_object(self, request: MessageRequest, info: bool) -> Steps:
        self._check(request)
        if request.found_dtype != OBJECT_CODE:
            self._messages.let_go(request)
            raise no_object_error(request, self.rank, self.world_size)
        first = destination_of(OBJECT_ROW, (request.found_bytes,))
        first.buffer.dtype = "object"
        yield [self._rest_of(request, first)]
        return (yield from self._opened(first.finish(), request, info))

    def _opened(self, first: Bytes, request: MessageRequest, info: bool) -> Steps:
        """Receive the messages that follow the first one of an object."""
        data, parts = new_parts(first)
        if parts:
            place = request.found_place + 1
            yield [
                MessageRequest(
                    Kind.RECV, request.found_peer, request.found_tag, part, place=place + number
                )
                for number, part in enumerate(parts)
            ]
        value = object_of(data, parts)
        return (value, received_message(request)) if info else value

    def _rest_of(self, request: MessageRequest, destination: Destination) -> MessageRequest:
        """Return the request for the data of a message that was taken."""
        buffer, held = destination.buffer, request.held
        if not request.found_description and dtype_name(request.found_dtype) != buffer.dtype:
            assert request.found_dtype == OBJECT_CODE
        request.held = 0
        return MessageRequest(Kind.RECV, request.found_peer, request.found_tag, buffer, held=held)

    def send_recv(
        self,
        x: AnyInput,
        dest: Unchecked,
        source: Unchecked,
        out: AnyInput,
        tag: Unchecked,
        async_op: bool,
        timeout_s: float | None,
        stream: AnyStream,
    ) -> AnyResult:
        """Send x and receive into `out`, or into a new array like x, at the same time."""
        check_peer(dest, "dest", self.world_size)
        check_peer(source, "source", self.world_size, may_be_any=True)
        check_tag(tag)
        given = source_of(x)
        template = given.template if out is None else template_of(out, "out")
        ensure_served(given.template)
        destination = self._destination(template, out, x)
        if template.device != given.template.device:
            raise ArgumentError(f"out lies on {template.device}, x on {given.template.device}")
        receive = MessageRequest(Kind.RECV, int(source), int(tag), destination.buffer)
        send = self._send_request(given, dest, tag)
        if self._dispatch.is_enqueued(template):
            name, requests = "send_recv", [receive, send]
            call = self._gpu_call(name, requests, template, destination, stream, timeout_s)
            has_out = out is not None and destination.lasting is out
            call.is_own = has_out and not given.is_packed
            return self._gpu.call(call, async_op, _in_group(destination))
        for array in (x, out):
            if type(array) is np.ndarray:
                self._learn(Kind.RECV, array.dtype)
        steps = self._exchanging(receive, send, destination, out)
        return self.queue.deliver("send_recv", steps, async_op, timeout_s, _in_group(destination))

    def _exchanging(
        self, receive: MessageRequest, send: MessageRequest, destination: Destination, out: AnyInput
    ) -> Steps:
        receiving = self._receiving(receive, destination, out, False)
        yield [*next(receiving), send]
        if send.error is not None:
            raise send.error
        return (yield from receiving)

    def raise_failed(self, rows: bytearray, out: AnyInput = None) -> NoReturn:
        """Raise the error of a failed call of a compiled entry, which has returned `rows`."""
        for request in self._messages.ended_together(rows):
            if request.is_misfit:
                request.buffer = source_of(out, "out").buffer
            self._check(request)
        raise AssertionError("all of these messages were sent and received")

    # --- probing, plans ---------------------------------------------------------------------------

    def probe(
        self, source: Unchecked, tag: Unchecked, wait: bool, timeout_s: float | None
    ) -> Message | None:
        """Return the message that a receive would get; None if there is none yet."""
        check_peer(source, "source", self.world_size, may_be_any=True)
        check_tag(tag, may_be_any=True)
        if wait and (row := self._messages.find(source, tag, timeout_s)) is not None:
            return self.found(row)
        request = MessageRequest(Kind.PROBE, int(source), int(tag))
        if self.queue.grouped is not None:
            check_in_group(self.queue.grouped, "probe", False, NOT_IN_GROUPS)
        if wait:
            self.queue.deliver("probe", self._checked(request), False, timeout_s)
        else:
            self._group.check_open()
            self._group.raise_if_aborted()
            self.queue.go_on_with_called()
            if not self._messages.probe(request):
                return None
        return message_of(request, self.receive_message)

    def found(self, row: bytearray) -> Message:
        """Return the Message of the probe that an entry has run; or raise its error."""
        plain = self._messages.plain_array(row)
        if plain is not None:
            return array_message(*plain, self.receive_message)
        request = self._messages.ended(row)
        self._check(request)
        return message_of(request, self.receive_message)

    def plan(self, kind: Kind, x: AnyInput, peer: Unchecked, tag: Unchecked) -> Plan[AnyResult]:
        """Prepare a send or receive that runs repeatedly on the same memory."""
        sends = kind == Kind.SEND
        check_peer(peer, "dest" if sends else "source", self.world_size, may_be_any=not sends)
        check_tag(tag, may_be_any=not sends)
        template = template_of(x, "x" if sends else "out")
        self._refuse_gpu(template, "x" if sends else "out")
        if sends:
            source = source_of(x)
            if source.is_packed or template.number is not None:
                raise ArgumentError("a plan needs x to be a C-contiguous array: it is not copied")
            request = self._send_request(source, peer, tag)
        else:
            destination = self._destination(template, x)
            if destination.lasting is None:
                raise ArgumentError(
                    "a plan needs out to be a writable C-contiguous array: every call writes the "
                    "same memory"
                )
            request = MessageRequest(Kind.RECV, int(peer), int(tag), destination.buffer)
        prepared, kept = self._messages.plan(request)

        def run_slowly(_kept: object = kept) -> None:
            """Run it as an ordinary call, for its errors."""
            again = dataclasses.replace(request)
            steps = self._sending([again]) if sends else self._checked(again)
            self.queue.deliver(kind.name.lower(), steps, False, None, NOT_IN_GROUPS)

        return Plan(prepared, self.raise_status, run_slowly, x)

    def _checked(self, request: MessageRequest) -> Steps:
        yield [request]
        self._check(request)

    def raise_status(self, status: int) -> None:
        """Raise the error for a status of compiled code, unless it only left the call to Python."""
        if status not in _LEFT_TO_PYTHON:
            self._group.raise_for(status)

    # --- shared parts -----------------------------------------------------------------------------

    def _refuse_gpu(self, template: Template, what: str) -> None:
        if self._dispatch.is_enqueued(template, what):
            raise ArgumentError("plans of messages are for host arrays, and not with mixed=True")

    def _learn(self, kind: Kind, dtype: np.dtype[np.generic]) -> None:
        name = numpy_dtype_name(dtype)
        self._messages.learn(kind, dtype, name, description_of(dtype, name))

    def _check(self, request: MessageRequest) -> None:
        """Raise the error of a request that has failed by itself."""
        if request.error is not None:
            raise request.error
        if request.expired_ns:
            raise expired_error(request, self.rank, self.world_size)
        if request.is_gone:
            raise gone_error(request, self.rank, self.world_size)
        if request.is_misfit:
            raise misfit_error(request, self.rank, self.world_size)

    def _gpu_call(
        self,
        name: str,
        requests: list[MessageRequest],
        template: Template,
        destination: Destination | None,
        stream: AnyStream,
        timeout_s: float | None,
    ) -> GpuCall:
        """Return messages of GPU arrays as one GPU call."""
        for request in requests:
            if request.peer == ANY_SOURCE or request.tag == ANY_TAG:
                raise ArgumentError(
                    f"{name} of GPU arrays (with mixed=True: of any) must name its source and tag: "
                    "messages are matched by rank and order alone, so no rank can tell which one "
                    "has come. Send the choice first, by send_object or as a host array"
                )
            if request.peer == self.rank and len(requests) == 1 and self._gpu.grouped is None:
                raise ArgumentError(
                    f"{name} of GPU arrays (with mixed=True: of any) to or from this rank itself "
                    "would wait for ever: use send_recv or group()"
                )
        from gpucoll.calls.gpu.call import GpuCall

        finish: Callable[[], Any] = (lambda: None) if destination is None else destination.finish
        return GpuCall(
            name, template, finish, messages=requests, stream=stream, timeout_s=timeout_s
        )

    def _destination(self, template: Template, out: AnyInput, x: AnyInput = None) -> Destination:
        ensure_served(template, "x" if out is None else "out")
        return destination_of(template, template.shape, out, x=x, in_place_at=None)


def _in_group(destination: Destination) -> AnyResult:
    """Return the result of a receive inside a group."""
    return NOT_IN_GROUPS if destination.lasting is None else destination.lasting


def _template_of(message: MessageRequest) -> Template:
    """Return the template of the array that a found message carries, if it can be told."""
    name, dtype = name_of(message), dtype_name(message.found_dtype)
    if message.found_shape is None or (name not in DTYPES and not message.found_description):
        raise untold_error(message, name)
    if message.found_description:
        made = template_like(message.found_shape, described_dtype(message.found_description))
    else:
        made = template_like(message.found_shape, dtype)
    return made._replace(number=number_type_of(message))


__all__ = ["PointToPoint", "Transfers"]
