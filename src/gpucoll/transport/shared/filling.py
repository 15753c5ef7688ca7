"""Filling shared memory with the stores that are faster just now, and emptying it.

Ordinary stores leave the data in this core's caches, where the reader finds it soon. They must
first take the lines back from the core that read them last. Between two groups of cores of AMD's
Zen 4 that takes 27 ns for each line, one line after the other. Non-temporal stores, which bypass
the caches, take 2 ns a line everywhere, but then the reader fetches the data from memory
(`docs/decisions/0106-fills.md`).

The placement of the ranks decides which stores are faster, and a virtual machine may change it at
any time. So each rank times its own fills and chooses its own stores. No other rank needs to know.
"""

from __future__ import annotations

from typing import Final

from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import call_copy
from gpucoll.transport.shared.flags import clock_ns
from gpucoll.transport.shared.words import Context

ALWAYS: Final = 2
"""As `Tuning.nontemporal_fills`: ordinary stores are not tried."""
LEAST_BYTES: Final = 8192
"""Smaller fills are ordinary and not timed."""
SLOW_NS_PER_KIB: Final = 80
"""From here on ordinary stores are slow. They take 25 to 60 within a group of cores, else 140."""
TRIAL_BYTES: Final = 12 << 20
"""How much is stored in the ordinary way before that is judged: twice the memory filled in turn.

Until then the lines were stored past the caches last time, or never, and cost more.
"""
WINDOW_BYTES: Final = 4 << 20
"""Ordinary stores are judged by whether most of this many bytes took long."""
FIRST_SPAN_BYTES: Final = 64 << 20
"""How much is stored past the caches before ordinary stores are tried again.

Each trial in vain doubles it, up to `LONGEST_SPAN_BYTES`.
"""
LONGEST_SPAN_BYTES: Final = 1 << 30
LARGE_BYTES: Final = 16 << 20
"""Results of this size and more are stored past the caches, in which they would not stay."""


@inline
def fill(context: Context, destination: int, source: int, size_bytes: int) -> None:
    """Copy private data to shared memory."""
    ahead = context.prefetch_bytes
    if context.copy_nontemporal == 0 or size_bytes < LEAST_BYTES:
        call_copy(context.copy_posted, destination, source, size_bytes, ahead)
    elif context.nontemporal_left > 0:
        context.nontemporal_left -= size_bytes
        call_copy(context.copy_nontemporal, destination, source, size_bytes, ahead)
    else:
        begun_ns = clock_ns(context.fill_clock)
        call_copy(context.copy_posted, destination, source, size_bytes, ahead)
        _judge(context, size_bytes, clock_ns(context.fill_clock) - begun_ns)


@inline
def empty(
    context: Context, kernel: int, destination: int, source: int, size_bytes: int, whole_bytes: int
) -> None:
    """Copy a part of a result to private memory: by this kernel, unless the whole is large."""
    if context.copy_nontemporal != 0 and whole_bytes >= LARGE_BYTES:
        kernel = context.copy_nontemporal
    call_copy(kernel, destination, source, size_bytes, context.prefetch_bytes)


@inline
def _judge(context: Context, size_bytes: int, took_ns: int) -> None:
    """Count an ordinary fill; go on past the caches if most of such fills took long."""
    context.fill_tried += size_bytes
    if context.fill_tried < TRIAL_BYTES:
        return
    if took_ns * 1024 > SLOW_NS_PER_KIB * size_bytes:
        context.fill_slow += size_bytes
    if context.fill_tried < TRIAL_BYTES + WINDOW_BYTES:
        return
    is_slow = 2 * context.fill_slow > WINDOW_BYTES
    context.fill_tried = 0 if is_slow else TRIAL_BYTES
    context.fill_slow = 0
    if is_slow:
        span_bytes = max(context.fill_span, FIRST_SPAN_BYTES)
        context.nontemporal_left = span_bytes
        context.fill_span = min(2 * span_bytes, LONGEST_SPAN_BYTES)
    else:
        context.fill_span = FIRST_SPAN_BYTES
