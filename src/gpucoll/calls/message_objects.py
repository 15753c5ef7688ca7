"""Python objects as messages: the pickle, then each large buffer directly from its memory.

The first message has the sizes of the buffers that follow. Each of these is a message of its own,
which no receive can get by its tag. A large array inside an object is therefore copied no more
often than an array that is sent by itself.
"""

from __future__ import annotations

import ctypes
import pickle

import numpy as np
import numpy.typing as npt

from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.library import Template
from gpucoll.arrays.operands import template_like
from gpucoll.backends.protocol import MessageRequest
from gpucoll.calls.given import AnyObject
from gpucoll.calls.message import OBJECT
from gpucoll.errors import ArgumentTypeError
from gpucoll.transport.shared.words import Kind, Mode
from gpucoll.wording import rank_of

OBJECT_ROW: Template = template_like((0,), "uint8")
"""The template of the first message, without its length."""
_APART_BYTES = 16 << 10
"""Buffers of at least this size are messages of their own."""
_WORD = 8
_NO_BUFFERS = bytes(_WORD)
OBJECT_DTYPE = np.dtype(np.uint8, metadata={"gpucoll": OBJECT})
"""The dtype of bytes that are an object. Compiled entries recognise a dtype by its identity."""
Bytes = npt.NDArray[np.uint8]


def pickled(value: object, rank: int, world_size: int) -> tuple[Bytes, list[memoryview]]:
    """Return the data of an object's first message, and the buffers that follow it."""
    buffers: list[memoryview] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _APART_BYTES:
            return True
        buffers.append(raw)
        return False

    try:
        data = pickle.dumps(value, 5, buffer_callback=keep_inside)
    except Exception as error:  # of any kind: the object's own code may raise
        raise ArgumentTypeError(
            f"send_object on {rank_of(rank, world_size)}: this {type(value).__name__} cannot be "
            f"pickled: {error}. Pass data, or functions and classes of modules instead of local "
            "ones"
        ) from error
    if not buffers:
        return np.frombuffer(_NO_BUFFERS + data, OBJECT_DTYPE), buffers
    sizes = np.array([len(buffers), *(buffer.nbytes for buffer in buffers)], np.int64)
    return np.frombuffer(sizes.tobytes() + data, OBJECT_DTYPE), buffers


def object_requests(
    first: Bytes, buffers: list[memoryview], dest: int, tag: int
) -> list[MessageRequest]:
    """Return the messages of an object, from the result of `pickled`."""
    requests = [MessageRequest(Kind.SEND, dest, tag, _buffer_of(first, OBJECT))]
    for buffer in buffers:
        part = _buffer_of(np.frombuffer(buffer, np.uint8), "uint8")
        requests.append(MessageRequest(Kind.SEND, dest, tag, part, mode=Mode.FOLLOWS))
    return requests


def _buffer_of(data: npt.NDArray[np.uint8], dtype: str) -> Buffer:
    return Buffer(data.ctypes.data, data.shape, dtype, 1, data)


def new_parts(first: Bytes) -> tuple[memoryview, list[Buffer]]:
    """Return the pickle in a first message, and new memory for the buffers that follow."""
    whole = first.data
    if whole[:_WORD] == _NO_BUFFERS:
        return whole[_WORD:], []
    count = int(first[:_WORD].view(np.int64)[0])
    start = _WORD * (1 + count)
    sizes = first[_WORD:start].view(np.int64).tolist()
    parts = []
    for size_bytes in sizes:
        memory = bytearray(size_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        parts.append(Buffer(address, (size_bytes,), "uint8", 1, memory))
    return memoryview(first[start:].data), parts


def object_of(data: memoryview, parts: list[Buffer]) -> AnyObject:
    """Return the object that was received."""
    return pickle.loads(data, buffers=[part.owner for part in parts])
