"""The description of a message, as `probe` and a receive return it."""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpucoll.arrays.library import AnyArray
from gpucoll.backends.protocol import MessageRequest
from gpucoll.calls.given import AnyResult
from gpucoll.errors import StateError
from gpucoll.transport.shared.layout import MOST_DESCRIPTION_BYTES, SentNumber
from gpucoll.types import DTYPES, dtype_code, dtype_name

OBJECT = "object"
OBJECT_CODE = dtype_code(OBJECT)
"""The number that a message with a Python object has in place of its dtype's."""


@dataclass(frozen=True)
class Message:
    """The description of a message that `probe` has found or a receive has received.

    Attributes
    ----------
    source, tag : int
        Its sender and its tag.
    dtype : str
        Name of the elements' dtype; "object" for a message of `send_object`.
    shape : tuple of int or None
        The shape that was sent; None if it has more than eight dimensions.
    size_bytes : int
        Size of the data, in bytes.
    number : type or None
        If a number was sent, its type: int, float, complex, bool, or that of a NumPy scalar. None
        for arrays.
    count : int or None
        Number of elements; None if it is not known, beyond eight dimensions.
    """

    source: int
    tag: int
    dtype: str
    shape: tuple[int, ...] | None
    size_bytes: int
    number: type | None = None
    count: int | None = None
    _place: int = field(default=0, repr=False)
    _receive: Callable[..., Any] | None = field(default=None, repr=False, compare=False)

    def recv(
        self, out: AnyArray = None, *, async_op: bool = False, timeout_s: float | None = None
    ) -> AnyResult:
        """Receive exactly this message, whichever others there are. It can be received once.

        Parameters
        ----------
        out : array, optional
            Destination array, as for `Communicator.recv`. Default: a new array, the number, or the
            object, like the one that was sent.
        async_op : bool
            Return a `Work`. Any thread may do so, even while others wait.
        timeout_s : float, optional
            Deadline, in seconds.

        Raises
        ------
        StateError
            The message was received already: by this method, or by another receive for its source
            and tag. With `async_op` the Work raises the error.
        """
        if self._receive is None:
            raise StateError(
                f"the message from rank {self.source} with tag {self.tag} was received already: "
                "this Message only tells what it was"
            )
        return self._receive(self, out, async_op, timeout_s)


@functools.cache
def description_of(dtype: np.dtype[np.generic], name: str) -> bytes | None:
    """Return the description of a dtype that has no number, for the receiver of a message.

    None if the dtype has a number, or if the description is longer than a message can carry.
    """
    if name in DTYPES:
        return None
    data = pickle.dumps(dtype, 5)
    return data if len(data) <= MOST_DESCRIPTION_BYTES else None


@functools.lru_cache(maxsize=256)
def described_dtype(description: bytes) -> np.dtype[np.generic]:
    """Return the dtype of a sender's description."""
    dtype: np.dtype[np.generic] = pickle.loads(description)
    return dtype


def name_of(request: MessageRequest) -> str:
    """Return the name of the dtype of a message that was found."""
    if request.found_dtype == OBJECT_CODE:
        return OBJECT
    if request.found_description:
        return str(described_dtype(request.found_description))
    return dtype_name(request.found_dtype)


def message_of(
    request: MessageRequest,
    receive: Callable[..., AnyResult] | None = None,
    name: str | None = None,
) -> Message:
    """Return a found message as a Message. `receive` receives it, if that is still possible."""
    shape = () if request.found_dtype == OBJECT_CODE else request.found_shape
    return Message(
        request.found_peer,
        request.found_tag,
        name_of(request) if name is None else name,
        shape,
        request.found_bytes,
        number_type_of(request),
        None if shape is None else math.prod(shape),
        request.found_place,
        receive,
    )


def array_message(
    source: int,
    tag: int,
    code: int,
    shape: tuple[int, ...],
    size_bytes: int,
    place: int,
    receive: Callable[..., AnyResult] | None,
) -> Message:
    """Return the Message for a found array of a dtype that has a number."""
    made = object.__new__(Message)  # the __init__ of a frozen class takes four times as long
    fields = {
        "source": source,
        "tag": tag,
        "dtype": DTYPES[code],
        "shape": shape,
        "size_bytes": size_bytes,
        "number": None,
        "count": math.prod(shape),
        "_place": place,
        "_receive": receive,
    }
    object.__setattr__(made, "__dict__", fields)
    return made


def object_message(source: int, tag: int, size_bytes: int) -> Message:
    """Return the Message for an object that was received."""
    return Message(source, tag, OBJECT, (), size_bytes, None, 1)


def received_message(request: MessageRequest) -> Message:
    """Return the Message for a request that has received."""
    buffer = request.buffer
    return message_of(request, None, None if buffer is None else buffer.dtype)


def number_type_of(message: MessageRequest) -> type | None:
    """Return the type of the number that was found; None for an array."""
    if message.found_number is None:
        return None
    name = dtype_name(message.found_dtype)
    if message.found_number == SentNumber.PYTHON:
        return _PYTHON_TYPES[name]
    if message.found_description:
        return described_dtype(message.found_description).type
    try:
        return np.dtype(name).type
    except TypeError:  # bfloat16 without ml_dtypes, or a dtype that has no name here
        return np.generic


_PYTHON_TYPES: Mapping[str, type] = {
    "bool": bool,
    "int64": int,
    "uint64": int,
    "float64": float,
    "complex128": complex,
}
