"""What this host is made of, and who is near whom.

`cpus` says which CPUs this process may use; the launcher and the CPU backend ask it, so its names
are here too. `sysfs` and `nccl_xml` read where GPUs and NICs sit, `distances` says how far apart
they are, `rdma` whether a NIC can reach a GPU's memory, `default_gpu` which GPU a rank takes,
`memory` how much the host has left. None of those is imported before it is asked for by its own
name; none loads a library or touches a GPU.
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
