"""Schedules to try connections with: rows of (step, send, receive, how), by rank."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

NOBODY = (-1, 0, 0)
Range = tuple[int, int]
Rows = list[list[int]]


def row(step: int, send=NOBODY, receive=NOBODY, *, reduces=0, theirs_first=0, forwards=0):
    """Return a row; `send` and `receive` are (peer, offset, bytes)."""
    return [step, *send, *receive, reduces, theirs_first, forwards]


def parts(count: int, n_parts: int, item_bytes: int) -> list[Range]:
    """Return (offset, bytes) of parts of `count` items, as equal as can be."""
    edges = [count * part // n_parts * item_bytes for part in range(n_parts + 1)]
    return [(start, end - start) for start, end in itertools.pairwise(edges)]


def ring_all_reduce(rank: int, size: int, count: int, item_bytes: int) -> Rows:
    blocks = parts(count, size, item_bytes)
    right, left = (rank + 1) % size, (rank - 1) % size
    rows = []
    for step in range(2 * (size - 1)):
        send, receive = blocks[(rank - step) % size], blocks[(rank - step - 1) % size]
        reduces = int(step < size - 1)
        rows.append(
            row(step, (right, *send), (left, *receive), reduces=reduces, forwards=int(step > 0))
        )
    return rows


def recursive_doubling(rank: int, size: int, count: int, item_bytes: int) -> Rows:
    everything = (0, count * item_bytes)
    rows: Rows = []
    step, distance = 0, 1
    while distance < size:
        peer = rank ^ distance
        there = (peer, *everything)
        rows.append(row(step, there, there, reduces=1, theirs_first=int(peer < rank)))
        step, distance = step + 1, 2 * distance
    return rows


def halving_doubling(rank: int, size: int, count: int, item_bytes: int) -> Rows:
    start, end, halvings = 0, count, []
    distance = size // 2
    while distance:
        middle = (start + end) // 2
        lower, upper = (start, middle), (middle, end)
        mine, theirs = (upper, lower) if rank & distance else (lower, upper)
        halvings.append((rank ^ distance, mine, theirs))
        (start, end), distance = mine, distance // 2

    def there(peer: int, items: Range) -> tuple[int, int, int]:
        return peer, items[0] * item_bytes, (items[1] - items[0]) * item_bytes

    rows = [
        row(step, there(peer, theirs), there(peer, mine), reduces=1, theirs_first=int(peer < rank))
        for step, (peer, mine, theirs) in enumerate(halvings)
    ]
    for peer, mine, theirs in reversed(halvings):
        rows.append(row(len(rows), there(peer, mine), there(peer, theirs)))
    return rows


def bruck_all_gather(rank: int, size: int, block_bytes: int) -> Rows:
    """Block i of the buffer becomes that of rank + i."""
    rows: Rows = []
    held, step = 1, 0
    while held < size:
        count = min(held, size - held) * block_bytes
        to, source = (rank - held) % size, (rank + held) % size
        rows.append(row(step, (to, 0, count), (source, held * block_bytes, count)))
        held, step = held + min(held, size - held), step + 1
    return rows


def chain_broadcast(rank: int, size: int, size_bytes: int, n_pieces: int, forwards: int) -> Rows:
    rows: Rows = []
    before, after = rank - 1, rank + 1 if rank + 1 < size else -1
    for step, piece in enumerate(parts(size_bytes, n_pieces, 1)):
        if rank > 0:
            rows.append(row(2 * step, receive=(before, *piece)))
        if after >= 0:
            step_of_send = 2 * step + 1
            rows.append(row(step_of_send, (after, *piece), forwards=int(forwards and rank > 0)))
    return rows


def pairwise_exchange(rank: int, size: int, block_bytes: int) -> Rows:
    """Exchange in place: what this rank has for a peer goes, and the peer's part comes there."""
    rows = []
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        send, receive = (to, to * block_bytes), (source, source * block_bytes)
        rows.append(row(step, (*send, block_bytes), (*receive, block_bytes)))
    return rows


def rotation(rank: int, size: int, size_bytes: int) -> Rows:
    """Everything goes one rank on, in place."""
    return [row(0, ((rank + 1) % size, 0, size_bytes), ((rank - 1) % size, 0, size_bytes))]


def star_reduce(rank: int, size: int, size_bytes: int) -> Rows:
    """Rank 0 takes all in the order of ranks, in one step."""
    if rank:
        return [row(0, (0, 0, size_bytes))]
    return [row(0, receive=(peer, 0, size_bytes), reduces=1) for peer in range(1, size)]


def barrier(rank: int, size: int) -> Rows:
    rows: Rows = []
    distance = 1
    while distance < size:
        to, source = (rank + distance) % size, (rank - distance) % size
        rows.append(row(len(rows), (to, 0, 0), (source, 0, 0)))
        distance *= 2
    return rows


def drawn(seed: int, size: int, buffer_bytes: int, item_bytes: int) -> list[Rows]:
    """Return rows for each rank that fit each other, with whatever overlaps between the steps."""
    rng = random.Random(seed)
    schedule: list[Rows] = [[] for _ in range(size)]
    for step in range(rng.randint(1, 8)):
        used: list[list[Range]] = [[] for _ in range(size)]
        links = [(a, b) for a in range(size) for b in range(size) if a != b]
        for sender, receiver in rng.sample(links, rng.randint(1, len(links))):
            most = buffer_bytes // item_bytes
            size_bytes = min(rng.choice([0, 1, 3, 100, rng.randint(0, most)]), most) * item_bytes
            send = _place(rng, used[sender], size_bytes, buffer_bytes, item_bytes)
            receive = _place(rng, used[receiver], size_bytes, buffer_bytes, item_bytes)
            if send is None or receive is None:
                continue
            schedule[sender].append(row(step, (receiver, *send)))
            reduces, theirs_first = rng.randint(0, 1), rng.randint(0, 1)
            taken = row(
                step, receive=(sender, *receive), reduces=reduces, theirs_first=theirs_first
            )
            schedule[receiver].append(taken)
        for rank in range(size):
            _shuffle_last_step(rng, schedule[rank], step)
    return schedule


def _place(rng, used: list[Range], size_bytes: int, buffer_bytes: int, item_bytes: int):
    """Return a range that is one of those used, or shares nothing with them; None: none found."""
    for _ in range(20):
        same = [held for held in used if held[1] == size_bytes]
        if same and rng.random() < 0.5:
            return rng.choice(same)
        offset = rng.randint(0, (buffer_bytes - size_bytes) // item_bytes) * item_bytes
        end = offset + size_bytes
        if all(end <= start or offset >= start + length for start, length in used):
            used.append((offset, size_bytes))
            return offset, size_bytes
    return None


def _shuffle_last_step(rng, rows: Rows, step: int) -> None:
    """Sends and receives of a step may stand in any order, and in one row."""
    of_step = [one for one in rows if one[0] == step]
    del rows[len(rows) - len(of_step) :]
    rng.shuffle(of_step)
    sends = [one for one in of_step if one[1] >= 0]
    receives = [one for one in of_step if one[4] >= 0]
    while sends or receives:
        if sends and receives and rng.random() < 0.5:
            rows.append(sends.pop(0)[:4] + receives.pop(0)[4:])
        else:
            rows.append(
                (sends if sends and (not receives or rng.random() < 0.5) else receives).pop(0)
            )


def each(make, size: int, *arguments) -> list[Sequence[Sequence[int]]]:
    """Return the rows of every rank."""
    return [make(rank, size, *arguments) for rank in range(size)]
