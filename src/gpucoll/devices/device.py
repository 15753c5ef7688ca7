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


class Exported(NamedTuple):
    """Memory that other processes can open: what they must be told."""

    handle: bytes
    """Of the whole allocation that the memory is part of: opening it gives the base."""
    offset: int
    """Where the memory lies in that allocation, in bytes."""
    size_bytes: int
    """Of the whole allocation."""


class Device(Protocol):
    """One GPU of this process.

    Streams, events and memory are plain integers: the vendor's own handles, which every library
    understands. Methods raise BackendError where the driver reports an error; the *quick*
    functions return the driver's code instead, and `check` makes an error of it. Streams 0, 1 and 2
    (the vendor's default streams) mean those of the current device: enter the device first.

    Methods that make or measure something enter the device by themselves. The quick functions, and
    all that take a stream or an event, do not: they need any context of the device to be current in
    the calling thread, which it is after the thread used an array library on it, or inside ``with
    device:``.
    """

    kind: str
    """``"cuda"``, ``"rocm"`` or ``"host"``."""
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

    def stream_wait_value(self, stream: int, address: int, value: int) -> int:
        """Let what comes on the stream wait until the word at `address` is at least `value`.

        A word has 32 bits and lies at a multiple of 4; `address` is the GPU's (`register_host`,
        `allocate_pinned`, or its own memory). CUDA compares the signed difference modulo 2**32,
        HIP the unsigned numbers: whoever serves both lets a word grow from 0 to below 2**31.

        The driver knows nothing of the order that this makes: whatever writes the word must not
        come later on any stream of this process that the driver may run after this one.
        """

    def stream_write_value(self, stream: int, address: int, value: int) -> int:
        """Write a word of 32 bits when all that is on the stream now is done, and visible."""

    @property
    def can_wait_for_values(self) -> bool:
        """Whether streams can wait for words and write them; False: the host must signal.

        On AMD GPUs the functions are marked as beta by the vendor; this is what the runtime says.
        """

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

    def is_managed(self, address: int) -> bool:
        """Return whether it is managed memory, which moves between host and GPUs by itself."""

    # --- host memory that the GPU works with --------------------------------------------------

    def allocate_pinned(self, size_bytes: int) -> int:
        """Return page-locked host memory: one address for the host and for every GPU."""

    def free_pinned(self, address: int) -> None:
        """Give page-locked memory back; whatever used it is done."""

    def register_host(self, address: int, size_bytes: int) -> int:
        """Page-lock memory that is mapped here; return the address at which GPUs see it.

        That address may be another one than the host's. Both are multiples of a page.
        """

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`; `address` is the host's. Before the memory is unmapped."""

    # --- memory that other devices write ---

    def flush_remote_writes(self) -> None:
        """Let work that is on streams already see what other devices, as NICs, have written.

        To the GPU's own memory, by now; the device is current. Else only work that is enqueued
        from now on is sure to see it.
        """

    @property
    def remote_writes_problem(self) -> str:
        """Why that cannot be had, as a sentence's part; empty: it can."""

    # --- memory of other processes ------------------------------------------------------------

    def export_memory(self, address: int) -> Exported | None:
        """Return how other processes open this memory; None where they cannot.

        Managed memory and memory that a pool has made of virtual addresses cannot be exported.
        Whoever opens it stops using it before it is freed.
        """

    def open_exported(self, handle: bytes) -> int:
        """Return where an allocation of another process on this host begins here.

        The process that exported it cannot: it has the address. GPUs reach each other's memory
        from then on where they can at all (`can_access`).
        """

    def close_exported(self, base: int) -> None:
        """Let go of what `open_exported` returned; whatever used it is done."""

    def can_access(self, number: int) -> bool:
        """Return whether it reads and writes the memory of GPU `number` of this process."""

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
    "stream_wait_value",
)
"""What `Device.attribute` knows the names of."""
