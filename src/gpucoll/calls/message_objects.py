"""Python objects as messages: what is pickled, then each large buffer in it as it lies.

The first message says how large the buffers are that follow, each a message of its own, which no
receive by tag can get. So a large array inside an object is copied as often as one that is sent.
"""

from __future__ import annotations

import ctypes
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.library import Template
from gpucoll.arrays.operands import template_like
from gpucoll.backends.protocol import MessageRequest
from gpucoll.calls.message import OBJECT
from gpucoll.errors import ArgumentTypeError
from gpucoll.transport.shared.words import Kind, Mode
from gpucoll.wording import rank_of

OBJECT_ROW: Template = template_like((0,), "uint8")
"""What the first message is, but for its length."""
_APART_BYTES = 16 << 10
"""Buffers from this size on are messages of their own."""
_WORD = 8
_NO_BUFFERS = bytes(_WORD)
OBJECT_DTYPE = np.dtype(np.uint8, metadata={"gpucoll": OBJECT})
"""Of bytes that are an object: compiled entries know a dtype by its identity."""
Bytes = npt.NDArray[np.uint8]


def pickled(value: Any, rank: int, world_size: int) -> tuple[Bytes, list[memoryview]]:
    """Return what the first message of an object has, and the buffers that follow it."""
    buffers: list[memoryview] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _APART_BYTES:
            return True
        buffers.append(raw)
        return False

    try:
        data = pickle.dumps(value, 5, buffer_callback=keep_inside)
    except Exception as error:  # of whatever kind: the object's own code may raise
        raise ArgumentTypeError(
            f"send_object on {rank_of(rank, world_size)}: this {type(value).__name__} cannot be "
            f"pickled: {error}. Give data, and functions and classes of modules instead of local "
            "ones"
        ) from error
    if not buffers:
        return np.frombuffer(_NO_BUFFERS + data, OBJECT_DTYPE), buffers
    sizes = np.array([len(buffers), *(buffer.nbytes for buffer in buffers)], np.int64)
    return np.frombuffer(sizes.tobytes() + data, OBJECT_DTYPE), buffers


def object_requests(
    first: Bytes, buffers: list[memoryview], dest: int, tag: int
) -> list[MessageRequest]:
    """Return the messages that an object travels as, from what `pickled` has returned."""
    requests = [MessageRequest(Kind.SEND, dest, tag, _buffer_of(first, OBJECT))]
    for buffer in buffers:
        part = _buffer_of(np.frombuffer(buffer, np.uint8), "uint8")
        requests.append(MessageRequest(Kind.SEND, dest, tag, part, mode=Mode.FOLLOWS))
    return requests


def _buffer_of(data: npt.NDArray[np.uint8], dtype: str) -> Buffer:
    return Buffer(data.ctypes.data, data.shape, dtype, 1, data)


def new_parts(first: Bytes) -> tuple[memoryview, list[Buffer]]:
    """Return the pickled data of a first message, and memory for the buffers that follow."""
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


def object_of(data: memoryview, parts: list[Buffer]) -> Any:
    """Return the object that has come."""
    return pickle.loads(data, buffers=[part.owner for part in parts])
