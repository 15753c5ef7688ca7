"""The messages that are left in mailboxes at the end, for the report of a rank that closes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from gpucoll.backends.cpu.host.message_rows import held_words
from gpucoll.group.host.members import Members
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.layout import Envelope, Way
from gpucoll.transport.shared.words import Held, Mailbox, Mode, TransferTable

_Words = npt.NDArray[np.int64]


def unreceived(members: Members, table: _Words, peers: _Words) -> list[tuple[int, int]]:
    """Return sender and tag of the messages that arrived and were not received."""
    found, held = [], int(table[TransferTable.held])
    while held:
        words = held_words(held)
        if not words[Held.mode] & Mode.FOLLOWS:
            found.append((words[Held.sender], words[Held.tag]))
        held = words[Held.next]
    for sender in range(members.layout.ends):
        found += [(sender, tag) for tag in _lying(members, sender, peers[sender])]
    return found


def undelivered(
    members: Members, peers: _Words, has_closed: Callable[[int], bool]
) -> list[tuple[int, int]]:
    """Return receiver and number of the messages that wait at ranks which have closed."""
    found = []
    for peer in range(members.layout.ends):
        area = int(peers[peer, Mailbox.out_area])
        if not area or peer == members.rank or not has_closed(peer):
            continue
        matched = members.load(area - members.at(0) + layout.MAILBOX_MATCHED_COUNT)
        if left := int(peers[peer, Mailbox.out_number]) - matched:
            found.append((peer, left))
    return found


def _lying(members: Members, sender: int, words: _Words) -> Iterator[int]:
    """Return the tags of a rank's messages that are still in the mailbox."""
    place = members.layout
    pair = members.rank * members.layout.ends + sender
    if not members.load(place.opened + 8 * pair):
        return
    mailbox = place.mailboxes + pair * place.mailbox_stride
    starts = (mailbox + layout.MAILBOX_SMALL, mailbox + layout.MAILBOX_LARGE)
    sizes = (layout.MAILBOX_LARGE - layout.MAILBOX_SMALL, place.large_ring_bytes)
    which, offset, other = (
        int(words[field]) for field in (Mailbox.in_ring, Mailbox.in_offset, Mailbox.in_other)
    )
    while members.load(starts[which] + offset):
        record = starts[which] + offset
        packed = members.load(record + 8 * Envelope.packed)
        way = packed & 0xFF
        if way == Way.TO_START:
            offset = 0
            continue
        if way == Way.TO_OTHER:
            after = (offset + layout.ENVELOPE_BYTES) % sizes[which]
            which, offset, other = 1 - which, other, after
            continue
        if way != Way.PART and not (packed >> 8) & Mode.FOLLOWS:
            yield members.load(record + 8 * Envelope.tag)
        size_bytes = members.load(record + 8 * Envelope.size_bytes)
        offset = (offset + _record_bytes(packed, size_bytes)) % sizes[which]


def _record_bytes(packed: int, size_bytes: int) -> int:
    """Return the size of a record."""
    way, dimensions = packed & 0xFF, ((packed >> 16) & 0xFF) - 16
    description_bytes = packed >> 40
    extra = 0
    if way != Way.PART and (dimensions > 1 or description_bytes):
        extra = layout.SHAPE_BYTES + layout.round_up(description_bytes, 64)
    data = 0
    if way in (Way.POSTED, Way.PART):
        data = min(size_bytes, layout.POST_BYTES)
    if not extra and data <= layout.SMALLEST_BYTES:
        return layout.ENVELOPE_BYTES
    return layout.ENVELOPE_BYTES + extra + layout.round_up(data, 64)
