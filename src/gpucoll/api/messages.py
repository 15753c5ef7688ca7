"""Point-to-point: send, recv, send_recv, probe, as users call them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from gpucoll.api.front import Front
from gpucoll.arrays.array_kinds import note_written, numpy_view
from gpucoll.calls.begun_message import begun
from gpucoll.calls.message import Message
from gpucoll.transport.shared.words import Kind
from gpucoll.types import ANY_SOURCE, ANY_TAG

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Unpack

    from gpucoll.api.call_types import Array, Asynchronous, Blocking, Either, M, Number, Shape
    from gpucoll.arrays.library import AnyDtype, AnyStream
    from gpucoll.calls.given import AnyInput, AnyObject, AnyResult
    from gpucoll.calls.message_work import MessageWork
    from gpucoll.calls.plan import Plan

__all__ = ["Message", "Messages"]


class Messages(Front):
    """The methods of `Communicator` that move messages between two ranks.

    Messages between two ranks with the same tag arrive in the order in which they were sent, and
    are matched with receives in the order in which those were posted. They are independent of
    collectives: a pending message delays no other call. A message may be smaller than the array
    into which it is received. A larger message, or one of another dtype, is refused and stays in
    the queue.

    A `send` of up to 8 KiB returns at once as long as the messages queued at its receiver take no
    more than the eager room, 1 MiB. (Each takes its size and 64 bytes, rounded up to 64;
    ``eager_room_bytes`` in `config.CPU_TUNING` sets the limit.) Any other send may wait until it
    is received. Two ranks that both send first may therefore wait for each other: use `send_recv`,
    `group`, or ``async_op=True``, whose sends and receives all progress together.

    Any thread may start an asynchronous message; messages take effect in the order started. They
    progress whenever a thread starts, waits for or queries a message of this communicator, or
    waits in a collective.

    Cost: messages larger than `eager` bytes are copied once if the kernel lets the receiver read
    the sender's memory, otherwise twice; also twice where that is faster.
    """

    @overload
    def send(
        self, x: Array | Number, dest: int, tag: int = 0, **options: Unpack[Blocking]
    ) -> None: ...
    @overload
    def send(
        self, x: Array | Number, dest: int, tag: int = 0, **options: Unpack[Asynchronous]
    ) -> MessageWork[None]: ...
    @overload
    def send(
        self, x: Array | Number, dest: int, tag: int = 0, **options: Unpack[Either]
    ) -> MessageWork[None] | None: ...
    def send(
        self,
        x: AnyInput,
        dest: int,
        tag: int = 0,
        *,
        synchronous: bool = False,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: AnyStream = None,
    ) -> AnyResult:
        """Send x to another rank.

        Parameters
        ----------
        x : array or number
        dest : int
            The receiver. A rank may send to itself if a receive is posted or x is small.
        tag : int
            0 to 2**31 - 1. The receiver selects messages by it.
        synchronous : bool
            Wait until a receive has got the message, even a small one. For host arrays.
        async_op, timeout_s, stream
            See `ArrayCollectives`.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            An argument is invalid; nothing was sent.
        DeadlineError, PeerLostError
            The message was not received in time, or the receiver is gone.
        SharedMemoryError
            The host has no memory for a mailbox; nothing was sent.

        Examples
        --------
        >>> comm.send(x, dest=1, tag=7)
        """
        if not synchronous:
            if async_op:
                if timeout_s is None and (row := self._begin_send(x, dest, tag)) is not None:
                    return begun(self._message_queue, "send", row, None)
            else:
                sent = self._quick_send(x, dest, tag, timeout_s)
                if sent is not None:
                    return None if sent is x else self._point_to_point.raise_failed(sent)
        if stream is None and (shown := numpy_view(x)) is not None:
            again: Any = self.send  # with a NumPy view of the same bytes, which entries can read
            how = {"synchronous": synchronous, "async_op": async_op, "timeout_s": timeout_s}
            return again(shown, dest, tag, **how)
        return self._point_to_point.send(x, dest, tag, async_op, timeout_s, stream, synchronous)

    def _recv_into_tensor(
        self,
        out: AnyInput,
        shown: npt.NDArray[np.generic],
        source: int,
        tag: int,
        async_op: bool,
        timeout_s: float | None,
    ) -> AnyResult:
        """Receive into a tensor through its NumPy view, by an entry; None if no entry can."""
        if not async_op:
            result = self._quick_recv(shown, source, tag, timeout_s)
            if result is None:
                return None
            if result is not shown:
                self._point_to_point.raise_failed(result, shown)
            note_written(out)
            return out
        row = None if timeout_s is not None else self._begin_recv(shown, source, tag)
        if row is None:
            return None
        note_written(out)
        return begun(self._message_queue, "recv", row, out)

    @overload
    def recv(
        self,
        out: M | None = None,
        source: int = ANY_SOURCE,
        tag: int = 0,
        *,
        like: M | None = None,
        info: Literal[False] = False,
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
        info: Literal[True],
        **options: Unpack[Blocking],
    ) -> tuple[M, Message]: ...
    @overload
    def recv(
        self,
        out: M | None = None,
        source: int = ANY_SOURCE,
        tag: int = 0,
        *,
        like: M | None = None,
        **options: Unpack[Asynchronous],
    ) -> MessageWork[M]: ...
    @overload
    def recv(
        self,
        out: AnyInput = None,
        source: int = ANY_SOURCE,
        tag: int = 0,
        *,
        like: AnyInput = None,
        shape: Shape | None = None,
        dtype: AnyDtype = None,
        info: bool = False,
        **options: Unpack[Either],
    ) -> AnyResult: ...
    def recv(
        self,
        out: AnyInput = None,
        source: int = ANY_SOURCE,
        tag: int = 0,
        *,
        like: AnyInput = None,
        shape: int | Sequence[int] | None = None,
        dtype: AnyDtype = None,
        info: bool = False,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: AnyStream = None,
    ) -> AnyResult:
        """Receive a message from another rank.

        Parameters
        ----------
        out : array, optional
            Destination array, of the message's dtype and at least its size. Elements after the
            message, in C order, stay unchanged.
        source : int
            The sender, or ``ANY_SOURCE`` for any.
        tag : int
            The message's tag, or ``ANY_TAG`` for any.
        like, shape, dtype : optional
            Instead of `out`: receive into a new array of like's library, or of this shape and
            dtype; elements after the message are zero. Without any of them, the result is a new
            NumPy array like the one that was sent (including records and long doubles), or the
            number that was sent.
        info : bool
            Return (array, `Message`): the latter has the source, the tag and the number of elements
            received. A Work has it as its attribute `message`. For host arrays.
        async_op, timeout_s, stream
            See `ArrayCollectives`.

        Returns
        -------
        array or number
            `out`, or a new array. If a number was sent, the result is a number: an int, float,
            complex or bool for a Python number, a NumPy scalar for a NumPy scalar. Inside `group`,
            a receive returns a Work if it has `info`, or if its array is made only when the message
            has come.

        Raises
        ------
        MismatchError
            The message is larger, or has another dtype. It stays in the queue and can still be
            received by a receive that fits.
        DeadlineError
            No message came within `timeout_s`. For host arrays, the receive is withdrawn and the
            communicator stays usable: a rank may poll. Any other deadline breaks the communicator:
            the communicator's own, if `timeout_s` is not given, and that of a message which began
            to arrive but does not end.

        Examples
        --------
        >>> comm.recv(source=0, tag=7)
        >>> rows, message = comm.recv(np.empty(1000), info=True)
        >>> use(message.source, rows[:message.count])
        """
        if out is not None and not info:
            if async_op:
                if timeout_s is None and (row := self._begin_recv(out, source, tag)) is not None:
                    return begun(self._message_queue, "recv", row, out)
            else:
                result = self._quick_recv(out, source, tag, timeout_s)
                if result is not None:
                    return out if result is out else self._point_to_point.raise_failed(result, out)
            if stream is None and (shown := numpy_view(out)) is not None:
                received = self._recv_into_tensor(out, shown, source, tag, async_op, timeout_s)
                if received is not None:
                    return received
        elif out is not None and stream is None and not async_op:
            row = self._quick_recv_row(out, source, tag, timeout_s)
            if row is not None:
                return self._point_to_point.receive_informed(row, out)
        elif like is shape is dtype is stream is None and not async_op and not info:
            row = self._quick_take(source, tag, timeout_s)
            if row is not None:
                return self._point_to_point.receive_taken(row)
        return self._point_to_point.recv(
            out, source, tag, like, shape, dtype, async_op, timeout_s, stream, info
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
    ) -> MessageWork[M]: ...
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
    ) -> M | MessageWork[M]: ...
    def send_recv(
        self,
        x: AnyInput,
        dest: int,
        source: int,
        out: AnyInput = None,
        *,
        tag: int = 0,
        async_op: bool = False,
        timeout_s: float | None = None,
        stream: AnyStream = None,
    ) -> AnyResult:
        """Send x to one rank and receive a message from another at the same time.

        Parameters
        ----------
        x : array or number
        dest, source : int
            The receiver of x and the sender of the result; may be the same rank.
        out : array, optional
            Destination array; its size may differ from x's. Default: a new array like x.
        tag : int
            The tag of both messages.
        async_op, timeout_s, stream
            See `ArrayCollectives`.

        Examples
        --------
        >>> left, right = (comm.rank - 1) % comm.world_size, (comm.rank + 1) % comm.world_size
        >>> from_left = comm.send_recv(edge, dest=right, source=left)
        """
        if not async_op and out is not None:
            result = self._quick_send_recv(x, dest, source, out, tag, timeout_s)
            if result is not None:
                return out if result is out else self._point_to_point.raise_failed(result, out)
        return self._point_to_point.send_recv(
            x, dest, source, out, tag, async_op, timeout_s, stream
        )

    def send_object(
        self,
        value: AnyObject,
        dest: int,
        tag: int = 0,
        *,
        synchronous: bool = False,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> AnyResult:
        """Send a picklable object to another rank, which receives it with `recv_object`.

        Parameters
        ----------
        value : object
            The object is pickled at once, so it may be changed as soon as this call returns,
            except for buffers of 16 KiB and more in it (for example of NumPy arrays): they are sent
            from where they are, as by `send`.
        dest, tag, synchronous, async_op, timeout_s
            See `send`.

        Raises
        ------
        ArgumentTypeError
            The object cannot be pickled; nothing was sent.
        """
        return self._point_to_point.send_object(value, dest, tag, async_op, timeout_s, synchronous)

    def recv_object(
        self,
        source: int = ANY_SOURCE,
        tag: int = 0,
        *,
        info: bool = False,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> AnyObject:
        """Receive an object that another rank has sent with `send_object`.

        Parameters
        ----------
        source, tag, info, async_op, timeout_s
            See `recv`.

        Raises
        ------
        MismatchError
            The message is an array or a number. It stays in the queue, for `recv`.
        """
        return self._point_to_point.recv_object(source, tag, async_op, timeout_s, info)

    def plan_send(self, x: Array, dest: int, tag: int = 0) -> Plan[AnyResult]:
        """Prepare a `send` that runs repeatedly on the same memory: see `Plans`."""
        return self._point_to_point.plan(Kind.SEND, x, dest, tag)

    def plan_recv(self, out: M, source: int = ANY_SOURCE, tag: int = 0) -> Plan[M]:
        """Prepare a `recv` that runs repeatedly into the same memory: see `Plans`."""
        return self._point_to_point.plan(Kind.RECV, out, source, tag)

    def probe(
        self,
        source: int = ANY_SOURCE,
        tag: int = ANY_TAG,
        *,
        wait: bool = True,
        timeout_s: float | None = None,
    ) -> Message | None:
        """Return the message that a receive would get next, without receiving it.

        A message that a posted receive will get is never returned.

        Parameters
        ----------
        source, tag : int
            As for `recv`.
        wait : bool
            Wait until there is a message; otherwise return None if there is none yet.
        timeout_s : float, optional
            Deadline, in seconds. After it the call raises DeadlineError, and the communicator stays
            usable. Default: the communicator's deadline, which breaks it.

        Returns
        -------
        Message or None
            Its `recv` receives exactly this message, once, unless another receive for the same
            source and tag takes it first.
        """
        if wait and (row := self._quick_find(source, tag, timeout_s)) is not None:
            return self._point_to_point.found(row)
        return self._point_to_point.probe(source, tag, wait, timeout_s)
