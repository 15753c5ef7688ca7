"""The findings of a report, section by section: each has a mark, a label and a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from gpucoll.doctor.choice import (
    INTEL_LIBRARY,
    LIBRARIES,
    NEVER_ON_AMD,
    NEVER_ON_INTEL,
    VENDOR_NAMES,
)
from gpucoll.doctor.facts import DriverFound, Kernels, Report
from gpucoll.doctor.mpi import described

__all__ = ["ABSENT", "FAIL", "NETWORK", "NOTE", "OK", "Line", "gpu_names", "sections"]

OK, ABSENT, NOTE, FAIL = "ok", "-", "note", "FAIL"
"""Marks: present and usable; absent or unusable; worth a look; broken."""
NETWORK = "Network and topology"
SEVERAL_DISTRIBUTIONS = ("CuPy", "NCCL wheel", "MPI wheel")
"""Packages with several distributions, whose names say more."""


class Line(NamedTuple):
    """One finding."""

    mark: str
    label: str
    text: str


def sections(report: Report) -> list[tuple[str, Iterable[Line]]]:
    """Return title and findings of each section, in order; a section may have no findings."""
    return [
        ("CPU path", _cpu_path(report)),
        ("GPUs", _gpus(report)),
        ("Libraries", _libraries(report)),
        ("Python packages", _packages(report)),
        (NETWORK, _topology(report)),
        ('What backend="auto" takes', _auto(report)),
        ("Probes that failed", [Line(FAIL, x["probe"], x["problem"]) for x in report["problems"]]),
    ]


def _cpu_path(report: Report) -> Iterator[Line]:
    test, kernels = report["self_test"], report["kernels"]
    yield _self_test(report)
    yield from _cpus(report)
    yield from _memory(report)
    if test is not None and test["single_copy"] is not None:
        yield (
            Line(OK, "single copy", "ranks may read each other's memory (process_vm_readv)")
            if test["single_copy"]
            else Line(NOTE, "single copy", "not allowed: large messages are copied twice")
        )
    if kernels is not None:
        state = "compiled" if kernels["compiled"] else "not compiled yet"
        if test is not None and test["passed"] and not kernels["compiled"]:
            state = "compiled by the self-test"
        yield Line(OK, "CPU kernels", f"{state}, {_place(kernels)}")


def _place(kernels: Kernels) -> str:
    """Return where kernels are, and why they are not the package's."""
    if kernels["level"] is not None:
        return f"for {kernels['level']}, in the package ({kernels['folder']})"
    unused = f"the package's machine code is not used: {kernels['package_problem']}"
    return f"in {kernels['folder']}; {unused}"


def _self_test(report: Report) -> Line:
    test, kernels = report["self_test"], report["kernels"]
    if test is None:
        return Line(ABSENT, "self-test", "not run")
    if not test["passed"]:
        return Line(FAIL, "self-test", test["problem"] or "no word")
    compiling = ", compiling included" if kernels and not kernels["compiled"] else ""
    took = f"({test['elapsed_s']:.1f} s{compiling})"
    return Line(OK, "self-test", f"all_reduce between 2 processes was right {took}")


def _cpus(report: Report) -> Iterator[Line]:
    cpus = report["cpus"]
    if cpus is None:
        return
    model = f", {cpus['model']}" if cpus["model"] else ""
    text = f"{cpus['usable_count']} of {cpus['count']} usable ({cpus['usable']}){model}"
    if cpus["numa_nodes"] > 1:
        text += f", {cpus['numa_nodes']} NUMA nodes"
    yield Line(OK, "CPUs", text)
    if cpus["quota"] is not None:
        is_tight = cpus["quota"] < cpus["usable_count"]
        ranks = f"{cpus['ranks_at_once']} rank{'s' if cpus['ranks_at_once'] > 1 else ''}"
        text = f"{cpus['quota']:g} CPUs of time: {ranks} at full speed"
        yield Line(NOTE if is_tight else OK, "CPU quota", text)


def _memory(report: Report) -> Iterator[Line]:
    memory = report["memory"]
    if memory is None:
        return
    text = f"{_size(memory['available_bytes'])} available of {_size(memory['total_bytes'])}"
    if memory["limit_bytes"] is not None:
        text += f"; this process's cgroup may use {_size(memory['limit_bytes'])}"
    yield Line(OK, "memory", text)
    shm = (
        f"/dev/shm has {_size(memory['dev_shm_free_bytes'])} free"
        if memory["dev_shm_bytes"] is not None
        else "there is no /dev/shm"
    )
    if problem := memory["shared_memory_problem"]:
        yield Line(FAIL, "shared memory", f"{problem}; {shm}")
    elif memory["memfd_problem"]:
        text = f"no memfd ({memory['memfd_problem']}), so anonymous files are used instead; {shm}"
        yield Line(NOTE, "shared memory", text)
    else:
        yield Line(OK, "shared memory", f"memfd ({shm}; it is not needed)")


def _size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return "?"
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.3g} {unit}"
    return f"{size_bytes >> 10} KiB"


def _gpus(report: Report) -> Iterator[Line]:
    found = report["gpus"]
    if found is None:
        return
    present = {gpu["vendor"] for gpu in (report["topology"] or {"gpus": []})["gpus"]}
    for driver in found["drivers"]:
        vendor = VENDOR_NAMES[driver["vendor"]]
        devices = [x for x in found["devices"] if x["vendor"] == driver["vendor"]]
        facts = [
            f"kernel module {driver['kernel_module']}" if driver["kernel_module"] else "",
            "open" if driver["is_open"] and driver["vendor"] == "nvidia" else "",
            f"supports {_interface(driver['vendor'], driver['interface'])}"
            if driver["interface"]
            else "",
            f"toolkit {driver['toolkit']} (not needed)" if driver["toolkit"] else "",
        ]
        told = ", ".join(fact for fact in facts if fact)
        if devices:
            yield Line(OK, f"{vendor} driver", told)
        else:
            yield _no_gpu(vendor, told, driver, driver["vendor"] in present)
        if devices and driver["vendor"] == "amd":
            yield Line(NOTE, "AMD", NEVER_ON_AMD)
        for device in devices:
            parts = (device["name"], device["architecture"], device["pci_address"])
            yield Line(OK, f"GPU {device['number']}", ", ".join(part for part in parts if part))
        if devices:
            yield _compiler(driver)
    if found["kind"] == "sycl":
        yield Line(NOTE, "Intel GPU", f"{found['kind_reason']}; {NEVER_ON_INTEL}")
    for name, value in found["visible_devices"].items():
        yield Line(NOTE, "hidden GPUs", f"{name}={value!r} selects the GPUs that this process sees")


def _compiler(driver: DriverFound) -> Line:
    """Report what compiles the kernels for the GPU."""
    if driver["compiler"]:
        return Line(OK, "GPU kernels", f"compiled by {driver['compiler']}")
    return Line(NOTE, "GPU kernels", driver["compiler_problem"] or "there is no compiler for them")


def _no_gpu(vendor: str, told: str, driver: DriverFound, is_present: bool) -> Line:
    """Report why there is no GPU; with details only if the machine has one, or its driver."""
    if driver["kernel_module"] is None and not is_present:
        return Line(ABSENT, f"{vendor} driver", f"none, and no {vendor} GPU on the PCI bus")
    text = "; ".join(part for part in (told, driver["problem"]) if part)
    return Line(NOTE, f"{vendor} driver", text)


def _interface(vendor: str, version: str | None) -> str:
    return f"CUDA {version}" if vendor == "nvidia" else f"HIP {version}"


def _libraries(report: Report) -> Iterator[Line]:
    found = report["libraries"]
    if found is None:
        return
    for name in (*LIBRARIES.values(), INTEL_LIBRARY, "MPI"):
        copies = [copy for copy in found if copy["name"] == name]
        if not copies and name != INTEL_LIBRARY:
            yield Line(ABSENT, name, "not found")
        for copy in copies:
            label = name if name == "MPI" else f"{name} {copy['version'] or ''}".strip()
            told = f"{copy['version']}: " if name == "MPI" and copy["version"] else ""
            if copy["problem"]:
                text = f"{told}{copy['path']} ({copy['source']}): {copy['problem']}"
                yield Line(NOTE, label, text)
            elif copy["is_used"]:
                yield Line(OK, label, f"{copy['path']}; used: {copy['source']}")
            else:
                text = f"{told}{copy['path']}; not used ({copy['source']})"
                yield Line(ABSENT if name == "MPI" else NOTE, label, text)
    for is_well, *texts in described(report["mpi"], report["gpus"]):
        yield Line(OK if is_well else NOTE, *texts)


def _packages(report: Report) -> Iterator[Line]:
    packages = report["packages"]
    if packages is None:
        return
    absent = [x["name"] for x in packages if x["version"] is None]
    for package in packages:
        if package["version"] is not None:
            text = package["version"]
            if package["built_for"]:
                text += f" for {package['built_for']}"
            if package["name"] in SEVERAL_DISTRIBUTIONS:
                text += f" ({package['distribution']})"
            yield Line(OK, package["name"], text)
    if absent:
        yield Line(ABSENT, "not installed", ", ".join(absent))


def _topology(report: Report) -> Iterator[Line]:
    topology = report["topology"]
    if topology is None:
        return
    rdma = [nic for nic in topology["nics"] if nic["is_rdma"]]
    plain = [nic["name"] for nic in topology["nics"] if not nic["is_rdma"]]
    if topology["source"] != "sysfs":
        yield Line(NOTE, "topology", f"read from {topology['source']} (NCCL_TOPO_FILE)")
    if plain:
        yield Line(OK, "interfaces", ", ".join(plain))
    if not rdma:
        yield Line(ABSENT, "RDMA", "no RDMA device")
    for nic in rdma:
        parts = [
            nic["link_layer"] or "",
            f"{nic['speed_mbps'] / 1000:g} Gbit/s" if nic["speed_mbps"] else "",
            "down" if nic["is_up"] is False else "",
            nic["pci_address"],
            f"interface {' '.join(nic['interfaces'])}" if nic["interfaces"] else "",
        ]
        text = ", ".join(part for part in parts if part)
        yield Line(NOTE if nic["is_up"] is False else OK, nic["name"], text)
    names = gpu_names(report)
    if hidden := len(topology["gpus"]) - len(names):
        gpus = "one GPU" if hidden == 1 else f"{hidden} GPUs"
        yield Line(NOTE, "other GPUs", f"{gpus} of this machine that this process may not use")
    yield from _gpu_direct(report, names)
    if names:
        yield from _gpu_network(report)


def gpu_names(report: Report) -> dict[int, str]:
    """Return the name of each GPU of the topology, as this process numbers its GPUs.

    If the driver offers no GPU to this process, all GPUs of the topology are named by their places.
    """
    topology = report["topology"]
    places = topology["gpus"] if topology is not None else []
    found = report["gpus"]
    numbers = {x["pci_address"]: x["number"] for x in (found["devices"] if found else [])}
    own = [
        (numbers[gpu["pci_address"]], place)
        for place, gpu in enumerate(places)
        if gpu["pci_address"] in numbers
    ]
    shown = sorted(own) or [(place, place) for place in range(len(places))]
    return {place: f"GPU{number}" for number, place in shown}


def _gpu_direct(report: Report, names: Mapping[int, str]) -> Iterator[Line]:
    """Yield the verdicts on GPUDirect RDMA, with one line for GPUs with the same verdict."""
    by_text: dict[tuple[str, str], list[str]] = {}
    for place, name in names.items():
        verdict = report["gpu_direct_rdma"][place]
        serves = {True: "can serve", False: "cannot serve", None: "not known"}[verdict["serves"]]
        mark = OK if verdict["serves"] else ABSENT
        by_text.setdefault((mark, f"{serves}: {verdict['reason']}"), []).append(name)
    for (mark, text), alike in by_text.items():
        who = "" if len(alike) == len(names) else f"{', '.join(alike)}: "
        yield Line(mark, "GPUDirect RDMA", f"{who}{text}")


def _gpu_network(report: Report) -> Iterator[Line]:
    """Yield how the vendor's library reaches other hosts."""
    network = report["gpu_network"]
    if network is None:
        return
    value, source = network["socket_ifname"], network["socket_ifname_source"]
    linked = f"the hosts are linked by {network['interface'] or 'no interface that exists'}"
    if value is None:
        yield Line(NOTE, "between hosts", f"the library chooses its interface; {linked}")
    elif source == "gpucoll":
        text = f"gpucoll sets NCCL_SOCKET_IFNAME={value}, the interface that links the hosts"
        yield Line(OK, "between hosts", text)
    else:
        text = f"NCCL_SOCKET_IFNAME={value} from {source} is kept; {linked}"
        yield Line(OK, "between hosts", text)
    if network["ib_hca"] is not None:
        text = f"NCCL_IB_HCA={network['ib_hca']} from {network['ib_hca_source']} is kept"
        yield Line(OK, "RDMA devices", text)


def _auto(report: Report) -> Iterator[Line]:
    for choice in report["auto"]:
        mark = OK if choice["backend"] else ABSENT
        yield Line(mark, choice["arrays"], f"{choice['backend'] or 'refused'}: {choice['reason']}")
    count = len(report["default_gpus"])
    if count == 1:
        yield Line(OK, "default GPU", "every rank uses GPU 0")
    elif count:
        text = f"local rank n uses GPU n (of {count}); further ranks start again at GPU 0"
        yield Line(OK, "default GPU", text)
