"""Point-to-point: send, recv, send_recv, probe, as users call them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from gpucoll.api.front import Front
from gpucoll.calls.point_to_point import number_type_of
from gpucoll.transport.shared.words import Status
from gpucoll.types import ANY_SOURCE, ANY_TAG, dtype_name

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
    number : type or None
        Of a number that was sent as one (int, float, complex, bool, a NumPy scalar's); None for
        arrays.
    """

    source: int
    tag: int
    dtype: str
    shape: tuple[int, ...] | None
    size_bytes: int
    number: type | None = None


class Messages(Front):
    """What `Communicator` can do between two ranks.

    Messages between two ranks with one tag arrive in the order in which they were sent. The
    receiver names size and dtype exactly: a message that does not fit is refused, and stays.

    A `send` of up to `eager` bytes (see `describe`) returns at once while there is room; any other
    may wait until it is received. So two ranks that both send first may wait for each other: use
    `send_recv`, `group`, or ``async_op=True``, whose sends and receives all make progress together.

    Cost: messages beyond `eager` bytes are copied once where the kernel lets the receiver read the
    sender's memory, else twice.
    """

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
            self._raise_left()
        return self._point_to_point.send(x, dest, tag, async_op, timeout_s, stream)

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
            a new NumPy array as it was sent, or the number.
        async_op, timeout_s, stream
            See `ArrayCollectives`.

        Returns
        -------
        array or number
            `out`, or a new array. What was sent as a number arrives as one: a Python number as an
            int, float, complex or bool, a NumPy scalar as a NumPy scalar.

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
            self._raise_left()
        return self._point_to_point.recv(
            out, source, tag, like, shape, dtype, async_op, timeout_s, stream
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
            if self._backend.last_status() in (Status.ASIDE, Status.MISFIT):
                return self._point_to_point.finish_send_recv(x, dest, source, out, tag)
            self._raise_left()
        return self._point_to_point.send_recv(
            x, dest, source, out, tag, async_op, timeout_s, stream
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
        found = self._point_to_point.probe(source, tag, wait, timeout_s)
        if found is None:
            return None
        return Message(
            found.found_peer,
            found.found_tag,
            dtype_name(found.found_dtype),
            found.found_shape,
            found.found_bytes,
            number_type_of(found),
        )
