"""The interface of a GPU for gpucoll, for all vendors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final, NamedTuple, Protocol

PER_THREAD_STREAM = 2
"""Stands for a different stream in every thread: cudaStreamPerThread, hipStreamPerThread."""
DEFAULT_STREAMS: Final = (0, 1, PER_THREAD_STREAM)
"""Null, legacy and per-thread: handles for streams of whichever device is current."""


class Identity(NamedTuple):
    """The identity of a GPU, the same for every process of the host."""

    name: str
    """The product's name."""
    uuid: str
    """``GPU-xxxxxxxx-xxxx-...``; for a MIG slice, the slice's own."""
    pci_bus_id: str
    """``0000:3b:00.0``, in lower case, as in sysfs."""


class Exported(NamedTuple):
    """Memory that other processes can open: the facts that they need for it."""

    handle: bytes
    """Handle of the whole allocation that contains the memory: opening it gives the base."""
    offset: int
    """Offset of the memory in that allocation, in bytes."""
    size_bytes: int
    """Size of the whole allocation."""


class Device(Protocol):
    """One GPU of this process.

    Streams, events and memory are plain integers: the vendor's own handles, which every library
    understands. Methods raise BackendError if the driver reports an error. The *quick* functions
    return the driver's code instead, which `check` turns into an error. Streams 0, 1 and 2 (the
    vendor's default streams) are those of the current device: enter the device first.

    Methods that make or measure something enter the device by themselves. The quick functions, and
    all methods that take a stream or an event, do not: some context of the device must be current
    in the calling thread. It is after the thread used an array library on the device, or inside
    ``with device:``.
    """

    kind: str
    """``"cuda"``, ``"rocm"``, ``"sycl"`` or ``"host"``."""
    number: int
    """Its number among the GPUs that this process sees."""
    label: str
    """``"cuda:0"``: as in a Buffer's ``device``."""
    identity: Identity
    """The identity of the GPU."""

    # --- quick: one foreign call, 0 or the driver's code --------------------------------------

    record_event: Callable[[int, int], int]
    """``(event, stream)``: the event is reached when all present work on the stream is done."""
    stream_wait_event: Callable[[int, int, int], int]
    """``(stream, event, 0)``: later work on the stream waits for the event."""
    query_event: Callable[[int], int]
    """``(event)``: 0 if reached or never recorded, otherwise `not_ready`."""
    not_ready: int
    """The code of `query_event` while work is pending."""

    def stream_wait_value(self, stream: int, address: int, value: int) -> int:
        """Make later work on the stream wait until the word at `address` is at least `value`.

        A word has 32 bits and lies at a multiple of 4. `address` is the GPU's (`register_host`,
        `allocate_pinned`, or its own memory). CUDA compares the signed difference modulo 2**32, HIP
        the unsigned numbers: to serve both, let a word grow from 0 to below 2**31.

        The driver does not know of the order that this makes. So the work that writes the word must
        not come later on any stream of this process that the driver may run after this one.
        """

    def stream_write_value(self, stream: int, address: int, value: int) -> int:
        """Write a word of 32 bits when all present work on the stream is done and visible."""

    @property
    def can_wait_for_values(self) -> bool:
        """Whether streams can wait for words and write them; False: the host must signal.

        For AMD GPUs the vendor marks the functions as beta; this is the runtime's answer.
        """

    def addresses(self) -> dict[str, int]:
        """Return these functions' addresses, and those that enter the device, for compiled code.

        The keys are the names in `gpucoll.backends.gpu.enqueue_words.DriverTable`.
        """

    def check(self, code: int, what: str) -> None:
        """Raise BackendError if a quick function's code is not 0; `what` names the attempt."""

    # --- current device -----------------------------------------------------------------------

    def __enter__(self) -> Device:
        """Make it the thread's current device; can be nested, and used by several threads."""

    def __exit__(self, *exception: object) -> None:
        """Make the previous device current again."""

    # --- streams and events -------------------------------------------------------------------

    def create_stream(self, is_urgent: bool = False) -> int:
        """Return a new stream that does not wait for the default stream; urgent: high priority."""

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream; work on it still runs."""

    def is_stream_done(self, stream: int) -> bool:
        """Return whether everything on the stream is done; raise if something there has failed."""

    def synchronize_stream(self, stream: int) -> None:
        """Wait for the stream without a deadline; poll `is_stream_done` if one is needed."""

    def is_capturing(self, stream: int) -> bool:
        """Return whether a graph is being captured from this stream."""

    def relaxed_capture(self) -> AbstractContextManager[None]:
        """Let this thread query events while this or another thread captures a graph.

        Otherwise the driver takes a query for a mistake and abandons the capture. Events of the
        capture itself cannot be queried.
        """

    def owns_stream(self, stream: int) -> bool:
        """Return whether the stream belongs to this device; default streams belong to all."""

    def create_event(self) -> int:
        """Return a new event, without timing: the cheap kind."""

    def destroy_event(self, event: int) -> None:
        """Destroy an event, whether reached or not."""

    def is_event_done(self, event: int) -> bool:
        """Return whether the event is reached; raise if work before it has failed."""

    def synchronize_event(self, event: int) -> None:
        """Wait for the event without a deadline; poll `is_event_done` if one is needed."""

    def synchronize(self) -> None:
        """Wait for everything on the GPU, without a deadline, as freeing memory does."""

    # --- memory -------------------------------------------------------------------------------

    def allocate(self, size_bytes: int) -> int:
        """Return the address of new memory; MemoryError if there is none."""

    def free(self, address: int) -> None:
        """Free memory; waits for the work that uses it, as the driver does."""

    def copy(self, destination: int, source: int, size_bytes: int, stream: int) -> None:
        """Enqueue a copy between memory of any kind, host or device."""

    def fill(self, address: int, pattern: bytes, count: int, stream: int) -> None:
        """Enqueue writing a pattern of 1, 2, 4, 8 or 16 bytes, `count` times.

        Takes one operation for patterns that repeat within 4 bytes, otherwise log2(count) copies.
        """

    def device_of(self, address: int) -> int | None:
        """Return the number of the GPU that owns this memory; None: no GPU, or freed."""

    def memory_bytes(self) -> tuple[int, int]:
        """Return the size of free memory, and of all memory, in bytes."""

    def is_managed(self, address: int) -> bool:
        """Return whether it is managed memory, which moves between host and GPUs automatically."""

    # --- host memory for the GPU --------------------------------------------------------------

    def allocate_pinned(self, size_bytes: int) -> int:
        """Return page-locked host memory: the host and all GPUs use the same address."""

    def free_pinned(self, address: int) -> None:
        """Free page-locked memory; all work that used it is done."""

    def register_host(self, address: int, size_bytes: int) -> int:
        """Page-lock memory that is mapped here; return its address for GPUs.

        That address may differ from the host's. Both are multiples of a page.
        """

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`, before the memory is unmapped; `address` is the host's."""

    # --- memory that other devices write ---

    def flush_remote_writes(self) -> None:
        """Let work that is already on streams see what other devices, such as NICs, have written.

        This covers writes to the GPU's own memory up to now; the device is current. Without this
        call, only work that is enqueued from now on is sure to see them.
        """

    @property
    def remote_writes_problem(self) -> str:
        """Why that is not possible, as a part of a sentence; empty if it is."""

    # --- memory of other processes ------------------------------------------------------------

    def export_memory(self, address: int) -> Exported | None:
        """Return the facts with which other processes open this memory; None if they cannot.

        Managed memory, and memory that a pool has made of virtual addresses, cannot be exported. A
        process that opens it must stop using it before it is freed.
        """

    def open_exported(self, handle: bytes) -> int:
        """Return the base address here of an allocation of another process of this host.

        The process that exported it cannot open it, but has its address. From then on GPUs reach
        each other's memory if they can at all (`can_access`).
        """

    def close_exported(self, base: int) -> None:
        """Release the result of `open_exported`; all work that used it is done."""

    def can_access(self, number: int) -> bool:
        """Return whether this GPU reads and writes the memory of GPU `number` of this process."""

    # --- kernels ------------------------------------------------------------------------------

    @property
    def target(self) -> str:
        """The target for compiling kernels: ``"sm_90"``, ``"gfx942:sramecc+:xnack-"``."""

    def load_module(self, image: bytes) -> int:
        """Load compiled kernels; return the module.

        Parameters
        ----------
        image : bytes
            Machine code for `target`. An NVIDIA GPU also accepts PTX, which the driver compiles.
        """

    def unload_module(self, module: int) -> None:
        """Unload a module whose kernels are done; its functions become invalid."""

    def function_of(self, module: int, name: str) -> int:
        """Return a module's kernel by its undecorated name (``extern "C"``)."""

    def launch(
        self, function: int, blocks: int, threads: int, arguments: Sequence[bytes], stream: int
    ) -> None:
        """Enqueue a kernel.

        Parameters
        ----------
        function : int
            The result of `function_of`.
        blocks, threads : int
            Blocks of the grid, and threads of a block.
        arguments : sequence of bytes
            Each one by value, of the size that the kernel declares. They are copied before this
            returns.
        stream : int
        """

    # --- facts --------------------------------------------------------------------------------

    def attribute(self, name: str) -> int | None:
        """Return one of the vendor's attributes by its name in `ATTRIBUTES`; None if unknown."""

    def driver_version(self) -> str:
        """Return the version of the driver's programming interface: ``"12.8"``."""


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
"""The names that `Device.attribute` accepts."""
