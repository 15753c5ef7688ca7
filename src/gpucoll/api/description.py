"""What a communicator says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpucoll.backends.choice import Choice
from gpucoll.group.host.group import HostGroup
from gpucoll.version import __version__

PROMISES = {
    "same bits on every rank": "yes: ranks are combined in order 0..P-1",
    "same bits run after run": "yes",
    "same bits whatever size, chunks and placement": "yes",
    "half types": "accumulated in float32, rounded once",
}
"""The CPU backend's promises within one host (SEMANTICS, rounding and reproducibility)."""


@dataclass(frozen=True)
class Description:
    """Facts about a communicator, by name. ``str()`` makes a table; ``dict(description.facts)``."""

    title: str
    facts: Mapping[str, str]

    @staticmethod
    def of(
        group: HostGroup, backend: Any, choice: Choice, gpu_facts: Mapping[str, str]
    ) -> Description:
        """Collect the facts."""
        tuning = group.members.tuning
        size_mib = group.members.layout.size_bytes / 2**20
        facts = {
            "host arrays": f"backend {choice.host.backend}: {choice.host.reason}"
            if choice.host.backend
            else f"none: {choice.host.reason}",
            **gpu_facts,
            **backend.describe(),
            "shared segment": f"{size_mib:.1f} MiB",
            "arena of this rank": f"{group.members.arena.used_bytes} bytes in use of "
            f"{group.members.arena_bytes} of address space",
            "last call on this rank": backend.last_path().spelled,
            "deadline of a wait": f"{group.timeout_s:g} s",
            "prefetch": f"{tuning.prefetch_bytes} bytes ahead",
            **PROMISES,
        }
        title = f"gpucoll {__version__}, rank {group.rank} of {group.world_size}"
        return Description(title, facts)

    def __str__(self) -> str:
        width = max(len(name) for name in self.facts)
        lines = [f"  {name:<{width}}  {fact}" for name, fact in self.facts.items()]
        return "\n".join([self.title, *lines])
