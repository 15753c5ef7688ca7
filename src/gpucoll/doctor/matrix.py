"""GPU x GPU and GPU x NIC as a table in the style of ``nvidia-smi topo -m``."""

from __future__ import annotations

from collections.abc import Mapping

from gpucoll.doctor.facts import Topology

__all__ = ["LEGEND", "NO_NVLINKS", "matrix"]

LEGEND = (
    "PIX: one PCIe switch. PXB: several. PHB: the CPU's host bridge. NODE: several host bridges of "
    "a NUMA node. SYS: between NUMA nodes. NVn: n NVLinks. XGMI: AMD's links. *: this GPU's NIC."
)
NO_NVLINKS = "NVLinks are not shown, because NVML did not report them."


def matrix(topology: Topology, names: Mapping[int, str], width: int) -> list[str]:
    """Return the table's lines; columns that do not fit go into further blocks.

    Parameters
    ----------
    topology : Topology
        Which devices are close to each other.
    names : mapping
        Place in the topology's list -> name, for the GPUs to show, in order; at least one.
    width : int
        The maximum number of columns of a line.
    """
    rdma = [number for number, nic in enumerate(topology["nics"]) if nic["is_rdma"]]
    shown = rdma or list(range(len(topology["nics"])))
    nics = [topology["nics"][number]["name"] for number in shown]
    rows = [[*names.values(), *nics, "NUMA: CPUs"]]
    for number in names:
        gpu, words = topology["gpus"][number], topology["gpu_to_gpu"][number]
        to_gpus = ["X" if words[other] == "SELF" else words[other] for other in names]
        to_nics = [
            topology["gpu_to_nic"][number][nic]
            + ("*" if topology["nics"][nic]["name"] == gpu["nearest_nic"] else "")
            for nic in shown
        ]
        node = "-" if gpu["numa_node"] < 0 else str(gpu["numa_node"])
        rows.append([*to_gpus, *to_nics, f"{node}: {gpu['cpus'] or '-'}"])
    return _blocks(["", *names.values()], rows, width)


def _blocks(names: list[str], rows: list[list[str]], width: int) -> list[str]:
    """Arrange columns in as many blocks as are needed, each with the row names in front."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    first = max(map(len, names))
    lines: list[str] = []
    column = 0
    while column < len(widths):
        taken, used = column, first
        while taken < len(widths) and (taken == column or used + 1 + widths[taken] <= width):
            used += 1 + widths[taken]
            taken += 1
        if lines:
            lines.append("")
        for name, row in zip(names, rows, strict=True):
            cells = (row[x].ljust(widths[x]) for x in range(column, taken))
            lines.append(" ".join([name.ljust(first), *cells]).rstrip())
        column = taken
    return lines
