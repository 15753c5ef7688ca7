"""Streams of every library as addresses."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from gpucoll.arrays import streams
from gpucoll.errors import ArgumentTypeError


class WithProtocol:
    def __cuda_stream__(self):
        return 0, 77


@pytest.mark.parametrize(
    ("stream", "address"),
    [
        (0, 0),
        (77, 77),
        (WithProtocol(), 77),
        (SimpleNamespace(__cuda_stream__=(0, 77)), 77),
        (SimpleNamespace(ptr=77), 77),
        (SimpleNamespace(cuda_stream=77), 77),
        (SimpleNamespace(handle=ctypes.c_void_p(77)), 77),
        (SimpleNamespace(handle=ctypes.c_void_p(None)), 0),
    ],
)
def test_addresses(stream, address):
    assert streams.address_of(stream) == address


@pytest.mark.parametrize("stream", ["mine", None, True, -1, 1.5])
def test_what_is_no_stream(stream):
    with pytest.raises(ArgumentTypeError, match="stream must be a stream of CuPy"):
        streams.address_of(stream)
