"""The results of the probes as plain data, with the keys of ``gpucoll-doctor --json``.

Programs may rely on the keys: within one `SCHEMA` keys are added, but never renamed, and their
meanings do not change. docs/doctor.md describes each key; a test compares the two.
"""

from __future__ import annotations

from typing import Final, TypedDict

SCHEMA: Final = 1


class System(TypedDict):
    """The interpreter and the kernel."""

    python: str
    executable: str
    kernel: str
    machine: str


class Cpus(TypedDict):
    """CPUs that ranks may use."""

    model: str | None
    count: int
    usable: str
    usable_count: int
    quota: float | None
    ranks_at_once: int
    numa_nodes: int


class Memory(TypedDict):
    """Memory, shared memory and the limits on them."""

    total_bytes: int | None
    available_bytes: int | None
    limit_bytes: int | None
    memfd_problem: str | None
    shared_memory_problem: str | None
    dev_shm_bytes: int | None
    dev_shm_free_bytes: int | None
    ptrace_scope: int | None
    open_files: int | None
    locked_bytes: int | None


class Kernels(TypedDict):
    """Where compiled CPU kernels come from: the package's machine code or the cache."""

    folder: str
    compiled: bool
    level: str | None
    package_problem: str | None


class Package(TypedDict):
    """A Python package. If it is not installed, it has neither distribution nor version."""

    name: str
    distribution: str | None
    version: str | None
    built_for: str | None


class DriverFound(TypedDict):
    """What one vendor's driver reports."""

    vendor: str
    kernel_module: str | None
    is_open: bool | None
    interface: str | None
    toolkit: str | None
    problem: str | None
    compiler: str | None
    compiler_problem: str | None


class GpuFound(TypedDict):
    """A GPU that the driver offers to this process."""

    vendor: str
    number: int
    name: str
    uuid: str
    pci_address: str
    architecture: str | None
    gpu_direct_rdma: bool | None
    dma_buf: bool | None
    stream_wait_value: bool | None


class Gpus(TypedDict):
    """What the drivers of both vendors report, and whose GPUs a communicator would use."""

    kind: str
    kind_reason: str
    may_share: bool
    drivers: list[DriverFound]
    devices: list[GpuFound]
    visible_devices: dict[str, str]


class LibraryFound(TypedDict):
    """A copy of a library that moves arrays."""

    name: str
    path: str
    version: str | None
    source: str
    is_used: bool
    problem: str | None


class MpiGpuMemory(TypedDict):
    """Whether MPI reports that it accepts addresses of a kind of GPU; this is not tested."""

    kind: str
    may_serve: bool
    reason: str


class MpiFound(TypedDict):
    """mpi4py and the MPI that it finds; null if it finds none."""

    mpi4py: str
    library: str | None
    path: str | None
    thread_level: str | None
    large_counts: bool | None
    gpu_memory: list[MpiGpuMemory]
    problem: str | None


class GpuPlace(TypedDict):
    """Where a GPU of the host is attached, whether or not this process may use it."""

    vendor: str
    pci_address: str
    driver: str | None
    numa_node: int
    cpus: str
    nearest_nic: str | None
    nearest_nic_distance: str | None


class NicPlace(TypedDict):
    """Where a NIC is attached, and what it supports."""

    name: str
    pci_address: str
    is_rdma: bool
    is_up: bool | None
    speed_mbps: int | None
    link_layer: str | None
    numa_node: int
    interfaces: list[str]


class Topology(TypedDict):
    """Which devices are close to each other."""

    source: str
    gpus: list[GpuPlace]
    nics: list[NicPlace]
    gpu_to_gpu: list[list[str]]
    gpu_to_nic: list[list[str]]
    knows_nvlinks: bool
    peer_memory: dict[str, str]
    kernel_release: str
    has_dma_buf_options: bool | None


class GpuNetwork(TypedDict):
    """Which interface and NICs the vendor's library uses to reach other hosts."""

    interface: str | None
    socket_ifname: str | None
    socket_ifname_source: str | None
    ib_hca: str | None
    ib_hca_source: str | None


class GpuDirect(TypedDict):
    """Whether a NIC can reach a GPU's memory."""

    pci_address: str
    serves: bool | None
    reason: str
    command: str | None


class SelfTest(TypedDict):
    """The result of an all_reduce between two processes."""

    passed: bool
    elapsed_s: float | None
    single_copy: bool | None
    problem: str | None


class Choice(TypedDict):
    """The backend that ``backend="auto"`` uses for one kind of arrays; null if they are refused."""

    arrays: str
    backend: str | None
    reason: str


class Advice(TypedDict):
    """A problem or a missing part, and the command that helps."""

    what: str
    why: str
    command: str | None


class DefaultGpuFound(TypedDict):
    """The GPU that a rank uses by default."""

    local_rank: int
    vendor: str
    number: int
    pci_address: str


class Problem(TypedDict):
    """A probe that failed or did not answer in time."""

    probe: str
    problem: str


class Report(TypedDict):
    """The whole report. A section is null if its probe failed (see problems) or was not run."""

    schema: int
    gpucoll: str
    date: str
    cpu_path_works: bool
    system: System
    cpus: Cpus | None
    memory: Memory | None
    kernels: Kernels | None
    packages: list[Package] | None
    gpus: Gpus | None
    libraries: list[LibraryFound] | None
    mpi: MpiFound | None
    topology: Topology | None
    gpu_network: GpuNetwork | None
    gpu_direct_rdma: list[GpuDirect]
    self_test: SelfTest | None
    auto: list[Choice]
    default_gpus: list[DefaultGpuFound]
    advice: list[Advice]
    problems: list[Problem]
