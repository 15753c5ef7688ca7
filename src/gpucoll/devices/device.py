"""What gpucoll asks of a GPU, whoever made it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

PER_THREAD_STREAM = 2
"""Stands for another stream in every thread: cudaStreamPerThread, hipStreamPerThread."""


class Identity(NamedTuple):
    """Which GPU it is, the same for every process of the host."""

    name: str
    """The product's name."""
    uuid: str
    """``GPU-xxxxxxxx-xxxx-...``; of a MIG slice, the slice's own."""
    pci_bus_id: str
    """``0000:3b:00.0``, in lower case, as sysfs spells it."""


class Device(Protocol):
    """One GPU of this process.

    Streams, events and memory are plain integers: the vendor's own handles, which every library
    understands. Methods raise BackendError where the driver reports an error; the three *quick*
    functions return the driver's code instead, and `check` makes an error of it. Streams 0, 1 and 2
    (the vendor's default streams) mean those of the current device: enter the device first.

    Methods that make or measure something enter the device by themselves. The quick functions, and
    all that take a stream or an event, do not: they need any context of the device to be current in
    the calling thread, which it is after the thread used an array library on it, or inside ``with
    device:``.
    """

    kind: str
    """``"cuda"`` or ``"rocm"``."""
    number: int
    """Its place among the GPUs that this process sees."""
    label: str
    """``"cuda:0"``: as in a Buffer's ``device``."""
    identity: Identity
    """Which GPU it is."""

    # --- quick: one foreign call, 0 or the driver's code --------------------------------------

    record_event: Callable[[int, int], int]
    """``(event, stream)``: the event is reached when all that is on the stream now is done."""
    stream_wait_event: Callable[[int, int, int], int]
    """``(stream, event, 0)``: what comes on the stream from now on waits for the event."""
    query_event: Callable[[int], int]
    """``(event)``: 0 when reached or never recorded, `not_ready` before."""
    not_ready: int
    """What `query_event` returns while work is pending."""

    def addresses(self) -> dict[str, int]:
        """Return where compiled code finds them, and how it enters the device.

        By their names in `gpucoll.backends.gpu.enqueue_words.DriverTable`.
        """

    def check(self, code: int, what: str) -> None:
        """Raise BackendError where a quick function's code is not 0; `what` names the attempt."""

    # --- current device -----------------------------------------------------------------------

    def __enter__(self) -> Device:
        """Make it the thread's current device; nests, and other threads may do the same."""

    def __exit__(self, *exception: object) -> None:
        """Make the one before current again."""

    # --- streams and events -------------------------------------------------------------------

    def create_stream(self, is_urgent: bool = False) -> int:
        """Return a new stream that does not wait for the default stream; urgent: high priority."""

    def destroy_stream(self, stream: int) -> None:
        """Let go of a stream; what is on it still runs."""

    def is_stream_done(self, stream: int) -> bool:
        """Return whether everything on the stream is done. Raises what went wrong there."""

    def synchronize_stream(self, stream: int) -> None:
        """Wait for the stream without a deadline; poll `is_stream_done` where one is needed."""

    def is_capturing(self, stream: int) -> bool:
        """Return whether a graph is being captured from this stream."""

    def relaxed_capture(self) -> AbstractContextManager[None]:
        """Let this thread look at events while a graph is captured, by it or by another thread.

        Otherwise the driver takes a query for a mistake and gives the capture up. Events of the
        capture itself cannot be looked at.
        """

    def owns_stream(self, stream: int) -> bool:
        """Return whether the stream is this device's; the default streams are everyone's."""

    def create_event(self) -> int:
        """Return a new event, without timing: the cheap kind."""

    def destroy_event(self, event: int) -> None:
        """Let go of an event, reached or not."""

    def is_event_done(self, event: int) -> bool:
        """Return whether the event is reached. Raises what went wrong before it."""

    def synchronize_event(self, event: int) -> None:
        """Wait for the event without a deadline; poll `is_event_done` where one is needed."""

    def synchronize(self) -> None:
        """Wait for everything on the GPU, without a deadline, as giving memory back does."""

    # --- memory -------------------------------------------------------------------------------

    def allocate(self, size_bytes: int) -> int:
        """Return the address of new memory; MemoryError where there is none."""

    def free(self, address: int) -> None:
        """Give memory back; waits for the work that uses it, as the driver does."""

    def copy(self, destination: int, source: int, size_bytes: int, stream: int) -> None:
        """Enqueue a copy between memory of any kind, host or device."""

    def fill(self, address: int, pattern: bytes, count: int, stream: int) -> None:
        """Enqueue writing a pattern of 1, 2, 4, 8 or 16 bytes, `count` times.

        One operation for patterns that repeat themselves within 4 bytes, log2(count) copies else.
        """

    def device_of(self, address: int) -> int | None:
        """Return the number of the GPU whose memory this is; None: of none, or freed."""

    def memory_bytes(self) -> tuple[int, int]:
        """Return how much memory is free, and how much there is, in bytes."""

    # --- kernels ------------------------------------------------------------------------------

    @property
    def target(self) -> str:
        """What its kernels are compiled for: ``"sm_90"``, ``"gfx942:sramecc+:xnack-"``."""

    def load_module(self, image: bytes) -> int:
        """Load compiled kernels; return the module.

        Parameters
        ----------
        image : bytes
            Machine code for `target`; on an NVIDIA GPU PTX will do, too, which the driver compiles.
        """

    def unload_module(self, module: int) -> None:
        """Let go of a module whose kernels are done: its functions are no more."""

    def function_of(self, module: int, name: str) -> int:
        """Return a module's kernel by its name, which C++ has not decorated (``extern "C"``)."""

    def launch(
        self, function: int, blocks: int, threads: int, arguments: Sequence[bytes], stream: int
    ) -> None:
        """Enqueue a kernel.

        Parameters
        ----------
        function : int
            Of `function_of`.
        blocks, threads : int
            Of the grid, and of a block.
        arguments : sequence of bytes
            Each one by value, of the size that the kernel declares. They are copied before this
            returns.
        stream : int
        """

    # --- facts --------------------------------------------------------------------------------

    def attribute(self, name: str) -> int | None:
        """Return one of the vendor's attributes by its name in `ATTRIBUTES`; None: not known."""

    def driver_version(self) -> str:
        """Return the driver's version as far as its programming interface goes: ``"12.8"``."""


ATTRIBUTES = (
    "multiprocessor_count",
    "compute_capability_major",
    "compute_capability_minor",
    "virtual_memory_management",
    "gpu_direct_rdma",
    "gpu_direct_rdma_with_virtual_memory",
    "dma_buf",
    "multicast",
)
"""What `Device.attribute` knows the names of."""
