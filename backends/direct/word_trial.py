"""A trial whether a GPU's streams wait for a word in host memory, as the direct backend needs.

The driver's own answer is not enough: some of AMD's releases refuse the wait for memory of this
kind although the attribute reports that it works.
"""

from __future__ import annotations

import ctypes
import time
from typing import Final

from gpucoll.devices import Device

LIMIT_S: Final = 5.0
"""Time limit for a stream to go on once its word is there: one that takes longer never will."""
_STANDS_S: Final = 2e-3
"""How long a stream that must wait is observed."""
_PAUSE_S: Final = 5e-5
_SAID: Final = 7
TRIAL_BYTES: Final = 8
"""Two words: one that the stream waits for, and one that it writes after that."""

_stuck: list[tuple[Device, int]] = []
"""Streams that wait for ever: they are never freed, nor are the words that they wait for."""


def problem_of(device: Device) -> str:
    """Return the problem in page-locked memory of the driver; empty if there is none."""
    page = device.allocate_pinned(4096)
    problem = problem_at(device, page, page)
    if not is_stuck(device):
        device.free_pinned(page)
    return problem


def is_stuck(device: Device) -> bool:
    """Return whether a stream still waits for a word, so that nothing there can be freed."""
    return any(of is device for of, _ in _stuck)


def problem_at(device: Device, on_gpu: int, on_host: int) -> str:
    """Return the problem in `TRIAL_BYTES` of memory that nothing else uses; empty if there is none.

    Parameters
    ----------
    device : Device
    on_gpu, on_host : int
        The address of that memory for the GPU, and its address for the host.
    """
    waited, written = (ctypes.c_uint32.from_address(on_host + offset) for offset in (0, 4))
    waited.value = written.value = 0
    stream = device.create_stream()
    with device:
        for what, code in (
            ("wait for", device.stream_wait_value(stream, on_gpu, 1)),
            ("write", device.stream_write_value(stream, on_gpu + 4, _SAID)),
        ):
            if code:
                waited.value = 1
                device.destroy_stream(stream)
                return f"its driver reports that its streams do not {what} words: code {code}"
        has_waited = not _is_done(device, stream, _STANDS_S)
        waited.value = 1
        if not _is_done(device, stream, LIMIT_S):
            _stuck.append((device, stream))
            return f"a stream did not go on in {LIMIT_S:g} s once its word was there"
    device.destroy_stream(stream)
    if not has_waited:
        return "a stream went on before its word was there"
    if written.value != _SAID:
        return f"a stream wrote {written.value} where it was to write {_SAID}"
    return ""


def _is_done(device: Device, stream: int, limit_s: float) -> bool:
    due_s = time.monotonic() + limit_s
    while not device.is_stream_done(stream):
        if time.monotonic() > due_s:
            return False
        time.sleep(_PAUSE_S)
    return True
