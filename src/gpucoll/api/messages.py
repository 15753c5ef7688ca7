"""Point-to-point: send, recv, send_recv, probe, as users call them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from gpucoll.arrays.library import Template
from gpucoll.arrays.numpy_arrays import dtype_name as numpy_dtype_name
from gpucoll.arrays.operands import (
    ensure_served,
    source_of,
    template_like,
    template_of,
)
from gpucoll.backends.protocol import MessageRequest
from gpucoll.calls.delivering import Delivering, in_group
from gpucoll.calls.messages import check_in_group
from gpucoll.calls.preparation import NOT_IN_GROUPS
from gpucoll.calls.shapes import parse_shape
from gpucoll.errors import ArgumentError
from gpucoll.transport.shared.words import Context, Kind, Status
from gpucoll.types import ANY_SOURCE, ANY_TAG, DTYPES, dtype_name

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gpucoll.api.call_types import Array, Asynchronous, Blocking, Either, M, Number, Shape
    from gpucoll.calls.work import Work


@dataclass(frozen=True)
class Message:
    """What `probe` found: a message that can be received.

    Attributes
    ----------
    source, tag : int
        Whose it is, and its tag.
    dtype : str
        Name of the elements' dtype.
    shape : tuple of int or None
        As it was sent; None beyond eight dimensions.
    size_bytes : int
        Size of the data, in bytes.
    """

    source: int
    tag: int
    dtype: str
    shape: tuple[int, ...] | None
    size_bytes: int


class Messages(Delivering):
    """What `Communicator` can do between two ranks.

    Messages between two ranks with one tag arrive in the order in which they were sent. The
    receiver names size and dtype exactly: a message that does not fit is refused, and stays.

    A `send` of up to `eager` bytes (see `describe`) returns at once while there is room; any other
    may wait until it is received. So two ranks that both send first may wait for each other: use
    `send_recv`, `group`, or ``async_op=True``, whose sends and receives all make progress together.

    Cost: messages beyond `eager` bytes are copied once where the kernel lets the receiver read the
    sender's memory, else twice.
    """

    _quick_send: Callable[[Any, int, int], Any]
    _quick_recv: Callable[[Any, int, int], Any]
    _quick_send_recv: Callable[[Any, int, int, Any, int], Any]

    @overload
    def send(
        self, x: Array | Number, dest: int, tag: int = 0, **options: Unpack[Blocking]
    ) -> None: ...
    @overload
    def send(
        self, x: Array | Number, dest: int, tag: int = 0, **options: Unpack[Asynchronous]
    ) -> Work[None]: ...
    @overload
    def send(
        self, x: Array | Number, dest: int, tag: int = 0, **options: Unpack[Either]
    ) -> Work[None] | None: ...
    def send(
        self,
        x: Any,
        dest: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Send x to another rank.

        Parameters
        ----------
        x : array or number
        dest : int
            To whom; itself only with a receive that is already waiting, see the class.
        tag : int
            0 to 2**31 - 1: what the receiver asks for.
        async_op, timeout_s, stream
            See `ArrayCollectives`.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            An argument cannot serve; nothing was sent.
        DeadlineError, PeerLostError
            Nobody received it in time, or the receiver is gone.

        Examples
        --------
        >>> comm.send(x, dest=1, tag=7)
        """
        if not async_op and timeout_s is None:
            if self._quick_send(x, dest, tag) is not None:
                return None
            self._raise_quick()
        self._check_peer(dest, "dest")
        self._check_tag(tag)
        source = source_of(x)
        ensure_served(source.template)
        if source.template.device != "cpu":
            request = MessageRequest(Kind.SEND, int(dest), int(tag), source.buffer)
            call = self._gpu_message("send", [request], source.template, None, stream, timeout_s)
            call.is_own = not source.is_packed
            return self._gpu.call(call, async_op)
        self._check_host()
        if type(x) is np.ndarray:
            self._backend.messages.learn(Kind.SEND, x.dtype, source.template.dtype)
        request = MessageRequest(Kind.SEND, int(dest), int(tag), source.buffer)
        return self._deliver("send", [request], lambda: None, async_op, timeout_s)

    @overload
    def recv(
        self,
        out: M | None = None,
        source: int = ANY_SOURCE,
        tag: int = 0,
        *,
        like: M | None = None,
        **options: Unpack[Blocking],
    ) -> M: ...
    @overload
    def recv(
        self,
        out: M | None = None,
        source: int = ANY_SOURCE,
        tag: int = 0,
        *,
        like: M | None = None,
        **options: Unpack[Asynchronous],
    ) -> Work[M]: ...
    @overload
    def recv(
        self,
        out: Any = None,
        source: int = ANY_SOURCE,
        tag: int = 0,
        *,
        like: Any = None,
        shape: Shape | None = None,
        dtype: Any = None,
        **options: Unpack[Either],
    ) -> Any: ...
    def recv(
        self,
        out: Any = None,
        source: int = ANY_SOURCE,
        tag: int = 0,
        *,
        like: Any = None,
        shape: int | Sequence[int] | None = None,
        dtype: Any = None,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Receive what another rank has sent.

        Parameters
        ----------
        out : array, optional
            Where it goes: exactly as many elements as were sent, of that dtype.
        source : int
            From whom; ``ANY_SOURCE``: from whoever has sent something.
        tag : int
            Which; ``ANY_TAG``: whichever comes first.
        like, shape, dtype : optional
            Instead of `out`: a new array of like's library, this shape and dtype. With none of them
            a new NumPy array as it was sent.
        async_op, timeout_s, stream
            See `ArrayCollectives`.

        Returns
        -------
        array
            `out`, or a new array.

        Raises
        ------
        MismatchError
            The message has another size or dtype. It stays, for a receive that fits.

        Examples
        --------
        >>> comm.recv(source=0, tag=7)
        """
        if not async_op and timeout_s is None and out is not None:
            result = self._quick_recv(out, source, tag)
            if result is not None:
                return result
            self._raise_quick()
        self._check_peer(source, "source", may_be_any=True)
        self._check_tag(tag, may_be_any=True)
        if out is None and like is None and shape is None and dtype is None:
            if async_op or self._message_queue.grouped is not None:
                raise ArgumentError(
                    "recv with async_op=True, or inside group(), needs out, like or shape and dtype"
                )
            message = self.probe(source, tag, timeout_s=timeout_s)
            assert message is not None
            source, tag = message.source, message.tag
            template = _template_of_message(message)
        elif out is not None:
            template = template_of(out, "out")
        else:
            lengths = None if shape is None else parse_shape(shape)
            template = template_like(lengths, dtype, like)
        destination = self._destination(template, out)
        if template.device != "cpu":
            request = MessageRequest(Kind.RECV, int(source), int(tag), destination.buffer)
            call = self._gpu_message("recv", [request], template, destination, stream, timeout_s)
            call.is_own = out is not None and destination.lasting is out
            return self._gpu.call(call, async_op, in_group(destination))
        self._check_host("out")
        if type(out) is np.ndarray:
            self._backend.messages.learn(Kind.RECV, out.dtype, template.dtype)
        request = MessageRequest(Kind.RECV, int(source), int(tag), destination.buffer)
        return self._deliver(
            "recv", [request], destination.finish, async_op, timeout_s, in_group(destination)
        )

    @overload
    def send_recv(
        self,
        x: M,
        dest: int,
        source: int,
        out: M | None = None,
        *,
        tag: int = 0,
        **options: Unpack[Blocking],
    ) -> M: ...
    @overload
    def send_recv(
        self,
        x: M,
        dest: int,
        source: int,
        out: M | None = None,
        *,
        tag: int = 0,
        **options: Unpack[Asynchronous],
    ) -> Work[M]: ...
    @overload
    def send_recv(
        self,
        x: M,
        dest: int,
        source: int,
        out: M | None = None,
        *,
        tag: int = 0,
        **options: Unpack[Either],
    ) -> M | Work[M]: ...
    def send_recv(
        self,
        x: Any,
        dest: int,
        source: int,
        out: Any = None,
        *,
        tag: int = 0,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Send x to one rank and receive as much from another, both at once.

        Parameters
        ----------
        x : array or number
        dest, source : int
            To and from whom; may be the same rank.
        out : array, optional
            Where what comes goes; may be of another size than x. Default: a new array like x.
        tag : int
            Of both messages.
        async_op, timeout_s, stream
            See `ArrayCollectives`.

        Examples
        --------
        >>> left, right = (comm.rank - 1) % comm.world_size, (comm.rank + 1) % comm.world_size
        >>> from_left = comm.send_recv(edge, dest=right, source=left)
        """
        if not async_op and timeout_s is None and out is not None:
            result = self._quick_send_recv(x, dest, source, out, tag)
            if result is not None:
                return result
            if int(self._group.context[Context.STATUS]) in (Status.ASIDE, Status.MISFIT):
                return self._go_on(x, dest, source, out, tag)
            self._raise_quick()
        self._check_peer(dest, "dest")
        self._check_peer(source, "source", may_be_any=True)
        self._check_tag(tag)
        given = source_of(x)
        template = given.template if out is None else template_of(out, "out")
        ensure_served(given.template)
        destination = self._destination(template, out, x)
        if template.device != given.template.device:
            raise ArgumentError(f"out lies on {template.device}, x on {given.template.device}")
        if template.device != "cpu":
            requests = [
                MessageRequest(Kind.RECV, int(source), int(tag), destination.buffer),
                MessageRequest(Kind.SEND, int(dest), int(tag), given.buffer),
            ]
            name = "send_recv"
            call = self._gpu_message(name, requests, template, destination, stream, timeout_s)
            has_out = out is not None and destination.lasting is out
            call.is_own = has_out and not given.is_packed
            return self._gpu.call(call, async_op, in_group(destination))
        self._check_host()
        for array in (x, out):
            if type(array) is np.ndarray:
                self._backend.messages.learn(Kind.RECV, array.dtype, numpy_dtype_name(array.dtype))
        requests = [
            MessageRequest(Kind.RECV, int(source), int(tag), destination.buffer),
            MessageRequest(Kind.SEND, int(dest), int(tag), given.buffer),
        ]
        return self._deliver(
            "send_recv", requests, destination.finish, async_op, timeout_s, in_group(destination)
        )

    def probe(
        self,
        source: int = ANY_SOURCE,
        tag: int = ANY_TAG,
        *,
        wait: bool = True,
        timeout_s: float | None = None,
    ) -> Message | None:
        """Say which message a receive would get; it stays.

        Parameters
        ----------
        source, tag : int
            As for `recv`.
        wait : bool
            Wait until there is one; otherwise None says that there is none yet.
        timeout_s : float, optional
            Deadline, in seconds.
        """
        self._check_peer(source, "source", may_be_any=True)
        self._check_tag(tag, may_be_any=True)
        request = MessageRequest(Kind.PROBE, int(source), int(tag))
        if self._message_queue.grouped is not None:
            check_in_group(self._message_queue.grouped, "probe", False, NOT_IN_GROUPS)
        if not wait:
            self._group.check_open()
            self._group.raise_if_aborted()
            if not self._backend.messages.look(request):
                return None
        else:
            self._deliver("probe", [request], lambda: None, False, timeout_s)
        return Message(
            request.found_peer,
            request.found_tag,
            dtype_name(request.found_dtype),
            request.found_shape,
            request.found_bytes,
        )

    def _go_on(self, x: Any, dest: int, source: int, out: Any, tag: int) -> Any:
        """Finish a send_recv that the compiled entry has begun: nothing is sent a second time."""
        requests = [
            MessageRequest(Kind.RECV, source, tag, source_of(out).buffer),
            MessageRequest(Kind.SEND, dest, tag, source_of(x).buffer),
        ]
        self._backend.messages.resume(requests)
        if requests[0].is_misfit:
            raise self._misfit(requests[0])
        return out


def _template_of_message(message: Message) -> Template:
    """Return what a message is as an array, where that can be told."""
    if message.dtype not in DTYPES or message.shape is None:
        raise ArgumentError(
            f"recv cannot tell what rank {message.source} has sent ({message.size_bytes} bytes of "
            f"{message.dtype}): give out, or shape and dtype"
        )
    return template_like(message.shape, message.dtype)
