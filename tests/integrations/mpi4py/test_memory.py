"""The memory behind buffers: whose it is, and how long it stays."""

from __future__ import annotations

import os
import weakref

import numpy as np
import pytest

from gpucoll.integrations.mpi4py.memory import memory_of
from gpucoll.integrations.mpi4py.window_memory import shows


class Producer:
    """Gives its array by DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **_):
        return self.array.__dlpack__()


def test_memory_by_dlpack_keeps_its_producer():
    """A producer may keep in itself what the deleter of its capsule reads."""
    given = Producer(np.arange(3, dtype="i4"))
    memory, producer = memory_of(given, False), weakref.ref(given)
    del given
    assert producer() is not None
    assert memory.data is not None
    part = memory.data[4:8]
    del memory
    assert part.view("i4").tolist() == [1]
    assert producer() is not None
    del part
    assert producer() is None


def test_memory_by_dlpack_in_either_order():
    array = np.arange(6.0).reshape(2, 3)
    data = memory_of(Producer(array.T), False).data
    assert data is not None
    assert data.view("f8").tolist() == array.reshape(-1).tolist()
    with pytest.raises(BufferError):
        memory_of(Producer(array[:, 1:]), False)


def test_a_process_that_may_be_read_is_told_from_another():
    token = np.frombuffer(bytearray(b"sixteen byte tok"), np.uint8)
    address = token.ctypes.data
    assert shows(os.getpid(), address, token.tobytes())
    assert not shows(os.getpid(), address, b"sixteen others..")
    assert not shows(os.getpid(), 8, token.tobytes())
    assert not shows(2**22 + 1, address, token.tobytes())  # beyond the largest number of a process
