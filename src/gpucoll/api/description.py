"""What a communicator reports about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpucoll.backends.choice import Choice
from gpucoll.backends.protocol import HostBackend
from gpucoll.group.protocol import Group
from gpucoll.version import __version__


@dataclass(frozen=True)
class Description:
    """Facts about a communicator, by name, in ``facts``. ``str()`` formats them as a table."""

    title: str
    facts: Mapping[str, str]

    @staticmethod
    def of(
        group: Group, host: HostBackend, choice: Choice, gpu_facts: Mapping[str, str]
    ) -> Description:
        """Collect the facts."""
        facts = {
            "host arrays": f"backend {choice.host.backend}: {choice.host.reason}"
            if choice.host.backend
            else f"none: {choice.host.reason}",
            **gpu_facts,
            **group.describe(),
            "deadline of a wait": f"{group.timeout_s:g} s",
            **host.describe(),
        }
        title = f"gpucoll {__version__}, rank {group.rank} of {group.world_size}"
        return Description(title, facts)

    def __str__(self) -> str:
        width = max(len(name) for name in self.facts)
        lines = [f"  {name:<{width}}  {fact}" for name, fact in self.facts.items()]
        return "\n".join([self.title, *lines])
