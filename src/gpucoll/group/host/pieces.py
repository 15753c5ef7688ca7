"""Find the ranks whose counts for an all_to_all contradict each other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpucoll.collectives import Collective
from gpucoll.group.host.members import Members
from gpucoll.transport.shared.layout import Record


def disagreement(members: Members, sequence: int) -> str:
    """Describe between which ranks send_counts and recv_counts differ; empty: they agree.

    The ranks' tables are still in the slots of this call, because no rank has begun another call.
    """
    with members.held():
        return _disagreement(members, sequence)


def _disagreement(members: Members, sequence: int) -> str:
    everyone = range(members.world_size)
    records = [members.record_words(rank, sequence) for rank in everyone]
    exchanges = {int(each) for each in Collective if each.is_exchange}
    if not {int(record[Record.collective]) for record in records} <= exchanges:
        return ""
    if not all(record[Record.n_counts] for record in records):
        return ""
    tables = [members.pieces_words(rank, sequence) for rank in everyone]
    found = []
    for sender in everyone:
        for receiver in everyone:
            sent = int(tables[sender][receiver])
            expected = int(tables[receiver][members.world_size + sender])
            if sent != expected:
                found.append((sender, receiver, sent, expected))
    if not found:
        return ""
    sender, receiver, sent, expected = found[0]
    row_bytes = _row_bytes(records)
    if row_bytes and not sent % row_bytes and not expected % row_bytes:
        sizes = f"{sent // row_bytes} rows", f"{expected // row_bytes}"
    else:
        sizes = f"{sent} bytes", f"{expected}"
    more = f" (and {len(found) - 1} more pairs of ranks differ)" if len(found) > 1 else ""
    return (
        f"rank {sender} sends {sizes[0]} to rank {receiver}, which expects {sizes[1]}, in "
        f"all_to_all with send_counts and recv_counts{more}"
    )


def _row_bytes(records: list[npt.NDArray[np.int64]]) -> int:
    """Return the size of a row in bytes, which all ranks agree on; 0 if no rank has a row."""
    for record in records:
        rows = int(record[Record.dimensions])
        if rows > 0:
            return int(record[Record.size_bytes]) // rows
    return 0
