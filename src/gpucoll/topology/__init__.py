"""The parts of this host, and how near they are to each other.

`cpus` finds the CPUs that this process may use. The launcher and the CPU backend need it, so its
names are here too. `sysfs` and `nccl_xml` read where GPUs and NICs sit. `machine` tells how far
apart they are, `rdma` whether a NIC can reach a GPU's memory, `default_gpu` which GPU a rank takes,
and `memory` how much the host has left. These modules are imported only by their own names; none of
them loads a library or touches a GPU.
"""

from __future__ import annotations

from gpucoll.topology.cpus import (
    FILE_SYSTEM,
    cpu_quota,
    cpu_sets,
    parse_cpu_list,
    usable_cpu_count,
    usable_cpus,
)

__all__ = [
    "FILE_SYSTEM",
    "cpu_quota",
    "cpu_sets",
    "parse_cpu_list",
    "usable_cpu_count",
    "usable_cpus",
]
