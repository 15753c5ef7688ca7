"""A leader's part in an exchange, and the check that all parts are of the same call."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

from gpucoll.errors import MismatchError
from gpucoll.group.host.diagnosis import counts_hint
from gpucoll.group.world.hosts import Hosts
from gpucoll.wording import list_ranks, rank_of

_LENGTH: Final = struct.Struct("<I")


class HostPart(NamedTuple):
    """One host's part in an exchange.

    Attributes
    ----------
    digest : int
        Digest of the call's signature.
    described : str
        The call, as its user wrote it.
    failed : str
        The disagreement among this host's ranks, or an empty string if there was none.
    data : bytes
        The exchanged bytes.
    """

    digest: int
    described: str
    failed: str
    data: bytes

    def encode(self) -> bytes:
        """Return the part as bytes."""
        facts = json.dumps([self.digest, self.described, self.failed]).encode()
        return b"".join((_LENGTH.pack(len(facts)), facts, self.data))

    @staticmethod
    def decode(encoded: bytes) -> HostPart:
        """Return the part that was encoded."""
        (length,) = _LENGTH.unpack_from(encoded)
        end = _LENGTH.size + length
        digest, described, failed = json.loads(encoded[_LENGTH.size : end])
        return HostPart(digest, described, failed, encoded[end:])


def check_agreement(parts: Sequence[HostPart], hosts: Hosts, who: str) -> None:
    """Raise MismatchError unless all hosts made the same call; it names the odd ones first."""
    failed = [host for host, part in enumerate(parts) if part.failed]
    if failed:
        raise MismatchError(_disagreement_on(failed[0], parts, hosts, who))
    if len({part.digest for part in parts}) == 1:  # where rows differ with counts=, so do the texts
        return
    by_call = _by_call(parts, hosts)
    groups = sorted(by_call.items(), key=lambda item: len(item[1]))
    calls = "; ".join(f"{list_ranks(sorted(ranks))} called {text}" for (text, _), ranks in groups)
    if len({text for text, _ in by_call}) < len(by_call):
        calls += " (they differ in what is not shown here)"
    raise MismatchError(
        f"the ranks did not make the same call: {calls}. This is {who}. Nothing was written; make "
        f"the same calls in the same order on every rank{counts_hint(by_call)}. The communicator "
        "stays usable"
    )


def _by_call(parts: Sequence[HostPart], hosts: Hosts) -> dict[tuple[str, int], list[int]]:
    """Return, by call, the ranks of the hosts whose own ranks agreed on it."""
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    for host, part in enumerate(parts):
        if not part.failed:
            found[part.described, part.digest].extend(hosts.ranks[host])
    return found


def _disagreement_on(host: int, parts: Sequence[HostPart], hosts: Hosts, who: str) -> str:
    """Return a host's disagreement, worded for a rank of another host."""
    leader = rank_of(hosts.leader_of(host), hosts.world_size)
    others = "".join(
        f"; {list_ranks(sorted(ranks))} called {text}"
        for (text, _), ranks in _by_call(parts, hosts).items()
    )
    return parts[host].failed.replace(f". This is {leader}", f"{others}. This is {who}")
