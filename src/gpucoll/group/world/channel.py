"""The control channel between hosts: give every rank's bytes to every rank; the barrier."""

from __future__ import annotations

from gpucoll.collectives import NO_ROOT, Collective
from gpucoll.errors import MismatchError
from gpucoll.group.world.group import WorldGroup
from gpucoll.group.world.messages import pack, unpack
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.types import digest_of


class WorldChannel:
    """Moves bytes between all ranks of a `WorldGroup`.

    Cost: two exchanges inside each host, and ``log2(hosts)`` messages between leaders, of which the
    largest holds half of all.
    """

    def __init__(self, group: WorldGroup) -> None:
        self._group = group
        self._barrier = CallBlock(Collective.BARRIER, group.exchanges.loop)
        self._barrier.set_arrays((0,), 0, 0)
        self.run_barrier = group.host.prepare(self._barrier)
        """Runs a barrier and returns its `Status`; not while asynchronous calls are queued."""
        self._run_queued = group.host.prepare(self._barrier, queued=True)

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return when every rank has arrived."""
        self._group.calls.run_small(self._run_queued, self._barrier, timeout_s)

    def all_gather_bytes(
        self,
        data: bytes,
        collective: Collective,
        root: int = NO_ROOT,
        timeout_s: float | None = None,
    ) -> list[bytes]:
        """Return every rank's bytes, by rank."""
        group = self._group
        shown = "" if root == NO_ROOT else f"root={root}"
        name = f"{collective.spelled}({shown})"
        with group.calls.call(name, timeout_s) as call:
            mine = group.channel.all_gather_bytes(data, collective, root, call.left_s)
            found: bytes | MismatchError | None = None
            if call.leads:
                digest = digest_of((int(collective), root))
                found = call.tried(lambda: pack(call.exchange(pack(mine), digest, name)))
            by_host = unpack(call.deliver(collective, root, found))
            return group.hosts.in_rank_order(unpack(parts) for parts in by_host)
