"""Draw an all_reduce of GPUs on a bus, around a ring and by shares: the picture of docs/gpu.md.

::

    python tools/draw_gpu_ring.py docs/gpu_ring.svg

Half of the GPUs hang on each of two PCIe switches, which one root connects. All numbers are counted
from the steps that the direct backend makes. The tool also prints the rows of the document's table.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Final, NamedTuple

from schedules import svg

from gpucoll.backends.direct import ring, rounds
from gpucoll.backends.direct.peer_memory import HALF_BYTES
from gpucoll.backends.direct.rounds import Await, Combine, Exchange, Part, Say, Word
from gpucoll.backends.gpu.steps import Copy

EXPLANATIONS: Final = {
    "ring": "each GPU writes into the next one's memory",
    "shares": "each GPU reads from all others",
}
ITEM_BYTES: Final = 4
_GPU_BYTES: Final = 1 << 40  # each GPU's memory has addresses of its own
_WIDTH, _PANEL, _HEIGHT = 868, 418, 632
_ROOT, _SWITCH, _GPU, _FIRST = 88, 140, 198, 238  # the y of the parts of the bus, and of step 0
_N_HEIGHT = 120.0  # of a step that moves N bytes over the busiest link
_N_WIDTH = 5  # of a link that carries N bytes
_ACROSS, _INSIDE, _QUIET, _PALE = "#c2410c", "#1d4ed8", "#6b7280", "#f3f4f6"


class Move(NamedTuple):
    """Bytes from one GPU to another, after so many waits for another GPU's data."""

    source: int
    destination: int
    size_bytes: int
    waits: int


@dataclass(frozen=True)
class Traffic:
    """What the steps of all ranks move, and how many waits for data follow each other."""

    size: int
    moves: Sequence[Move]
    waits: int

    def switch(self, gpu: int) -> int:
        """Return the switch that a GPU hangs on."""
        return 2 * gpu // self.size

    def steps(self) -> list[list[Move]]:
        """Return the moves after each number of waits, if there are any."""
        numbers = sorted({move.waits for move in self.moves})
        return [[move for move in self.moves if move.waits == one] for one in numbers]

    def loads(self, moves: Iterable[Move]) -> Counter[tuple[str, int, str]]:
        """Return the bytes over each link and direction, seen from the GPU or switch below it."""
        loads: Counter[tuple[str, int, str]] = Counter()
        for source, destination, size_bytes, _ in moves:
            loads["gpu", source, "up"] += size_bytes
            loads["gpu", destination, "down"] += size_bytes
            if self.switch(source) != self.switch(destination):
                loads["switch", self.switch(source), "up"] += size_bytes
                loads["switch", self.switch(destination), "down"] += size_bytes
        return loads

    def each_way(self, kind: str, moves: Iterable[Move]) -> int:
        """Return the bytes over each link of a kind, in each direction: they must be equal."""
        (size_bytes,) = {load for link, load in self.loads(moves).items() if link[0] == kind}
        return size_bytes


def traffic(name: str, size: int, array_bytes: int = HALF_BYTES) -> Traffic:
    """Return the traffic of an all_reduce of one array by the ring or by shares."""
    addresses = tuple(gpu * _GPU_BYTES for gpu in range(1, size + 1))
    calls = []
    for rank, address in enumerate(addresses):
        exchange = Exchange(rank, size, addresses, HALF_BYTES)
        source, destination = address + _GPU_BYTES // 4, address + _GPU_BYTES // 2
        parts = [Part(source, destination, array_bytes // ITEM_BYTES)]
        if name == "ring":
            calls.append(ring.all_reduce(exchange, parts, ITEM_BYTES).steps)
        else:
            calls.append(rounds.reduction(exchange, parts, ITEM_BYTES, shares=True).steps)
    return _run(calls)


def _run(calls: Sequence[Sequence[rounds.Step]]) -> Traffic:
    """Run the steps of all ranks; only waits for data count, not those for free memory."""
    moves, said = [], {}
    waits, at = [0] * len(calls), [0] * len(calls)
    for _ in range(sum(map(len, calls))):  # each time at least one rank makes a step
        for rank, steps in enumerate(calls):
            for step in steps[at[rank] :]:
                if isinstance(step, Say) and step.word == Word.READY:
                    said[rank, step.number] = waits[rank]
                elif isinstance(step, Await) and step.word == Word.READY:
                    if (step.rank, step.number) not in said:
                        break
                    waits[rank] = max(waits[rank], said[step.rank, step.number] + 1)
                elif isinstance(step, Copy | Combine):
                    moves += [Move(*each, waits[rank]) for each in _moved(rank, step)]
                at[rank] += 1
    return Traffic(len(calls), moves, max(waits))


def _moved(rank: int, step: Copy | Combine) -> Iterator[tuple[int, int, int]]:
    """Yield the source, destination and size of what a rank reads or writes at other ranks."""
    if isinstance(step, Copy):
        step = Combine((step.destination,), (step.source,), step.size_bytes // ITEM_BYTES)
    reads = ((address // _GPU_BYTES - 1, rank) for address in step.sources)
    writes = ((rank, address // _GPU_BYTES - 1) for address in step.destinations)
    for source, destination in (*reads, *writes):
        if source != destination:
            yield source, destination, step.n_elements * ITEM_BYTES


def in_arrays(size_bytes: int) -> str:
    """Return bytes as a multiple of N, the size of the array."""
    share = Fraction(size_bytes, HALF_BYTES)
    if share.numerator == 1:
        return f"N/{share.denominator}" if share < 1 else "N"
    return f"{float(share):g} N"


def table_lines() -> Iterator[str]:
    """Yield the rows of the table in docs/gpu.md."""
    for size in (4, 8):
        for name in EXPLANATIONS:
            one = traffic(name, size)
            amounts = (in_arrays(one.each_way(kind, one.moves)) for kind in ("gpu", "switch"))
            yield f"| {size} GPUs, {name} | {one.waits} | {' | '.join(amounts)} |"


# --- the picture ----------------------------------------------------------------------------------


def draw() -> str:
    """Return the picture of four GPUs as an SVG document."""
    title = "all_reduce of 4 GPUs under 2 PCIe switches"
    words = (
        "N: bytes of a GPU's array. A link is the thicker, the more bytes it carries in all; "
        "a step is the taller, the more bytes its busiest link carries."
    )
    parts = [
        svg.head(_WIDTH, _HEIGHT, title),
        "<defs>" + svg.tip("across", _ACROSS) + svg.tip("inside", _INSIDE) + "</defs>",
        '<rect width="100%" height="100%" fill="white"/>',
        svg.text(16, 28, title, 16, "start", "bold"),
        *_panel(16, "ring"),
        *_panel(_WIDTH - _PANEL, "shares"),
        svg.line(16, _HEIGHT - 46, 44, _HEIGHT - 46, _look(True)),
        svg.text(52, _HEIGHT - 42, "over the link between the switches", 11, "start"),
        svg.line(268, _HEIGHT - 46, 296, _HEIGHT - 46, _look(False)),
        svg.text(304, _HEIGHT - 42, "under one switch", 11, "start"),
        svg.text(16, _HEIGHT - 20, words, 11, "start", fill=_QUIET),
    ]
    return "\n".join(parts) + "\n</svg>\n"


def _panel(left: int, name: str) -> Iterator[str]:
    """Yield one schedule: the bus, the steps below it, and what they add up to."""
    one = traffic(name, 4)
    yield svg.text(left, 56, name.capitalize(), 14, "start", "bold")
    yield svg.text(left + 66, 56, EXPLANATIONS[name], 12, "start", fill=_QUIET)
    xs = [left + x for x in (50, 130, 230, 310)]
    bottom = _FIRST + _N_HEIGHT * 2 + 8
    for switch in (0, 1):
        x = xs[2 * switch] - 34
        size = f'width="148" height="{bottom - _SWITCH}"'
        yield f'<rect x="{x}" y="{_SWITCH}" {size} fill="{_PALE}"/>'
    yield from _bus(one, xs)
    yield from _steps(one, xs, left)
    gpu, link = (in_arrays(one.each_way(kind, one.moves)) for kind in ("gpu", "switch"))
    sums = {
        "over the link between the switches, each way": link,
        "into and out of each GPU": gpu,
        "for data, one after the other": f"{one.waits} waits",
    }
    for row, (words, amount) in enumerate(sums.items()):
        y, colour = bottom + 26 + 20 * row, "#111827" if row else _ACROSS
        yield svg.text(left + 58, y, amount, 12, "end", "bold", colour)
        yield svg.text(left + 66, y, words, 12, "start")


def _bus(one: Traffic, xs: Sequence[int]) -> Iterator[str]:
    """Yield the tree of the bus, and the bytes over each link."""
    gpu, link = (one.each_way(kind, one.moves) for kind in ("gpu", "switch"))
    middles = [(xs[2 * switch] + xs[2 * switch + 1]) / 2 for switch in (0, 1)]
    root = sum(middles) / 2
    lines = [(root, _ROOT, x, _SWITCH, link, _ACROSS) for x in middles]
    above = (middles[one.switch(rank)] for rank in range(one.size))
    lines += [(top, _SWITCH, x, _GPU, gpu, _INSIDE) for top, x in zip(above, xs, strict=True)]
    for x1, y1, x2, y2, load, colour in lines:
        width = _N_WIDTH * load / HALF_BYTES
        yield svg.line(x1, y1, x2, y2, f'stroke="{colour}" stroke-width="{width:g}"')
        side = 1 if x2 > x1 else -1
        words, anchor = in_arrays(load), "start" if side > 0 else "end"
        yield svg.text((x1 + x2) / 2 + side * 14, (y1 + y2) / 2, words, 11, anchor, fill=colour)
    for x, y, width, words in (
        (root, _ROOT, 60, "root"),
        *((x, _SWITCH, 76, f"switch {number}") for number, x in enumerate(middles)),
        *((x, _GPU, 56, f"GPU {rank}") for rank, x in enumerate(xs)),
    ):
        yield (
            f'<rect x="{x - width / 2:g}" y="{y - 11}" width="{width}" height="22" rx="4" '
            f'fill="white" stroke="{_QUIET}"/>'
        )
        yield svg.text(x, y + 4, words, 12)


def _steps(one: Traffic, xs: Sequence[int], left: int) -> Iterator[str]:
    """Yield the steps from top to bottom, with what each moves between the switches."""
    y, edge = float(_FIRST), xs[-1] + 42
    yield svg.text(edge, _FIRST - 12, "each way", 10, "start", fill=_QUIET)
    for number, moves in enumerate(one.steps()):
        below = y + _N_HEIGHT * max(one.loads(moves).values()) / HALF_BYTES
        yield svg.line(left, y, edge + 44, y, f'stroke="{_QUIET}" stroke-width="0.6"')
        yield svg.text(left + 4, (y + below) / 2 + 4, f"{number}", 11, "start", fill=_QUIET)
        for source, destination in sorted({move[:2] for move in moves}):
            look = _look(one.switch(source) != one.switch(destination))
            yield svg.line(xs[source], y + 3, xs[destination], below - 2, look)
        words = in_arrays(one.each_way("switch", moves))
        yield svg.text(edge, (y + below) / 2 + 4, words, 11, "start", fill=_ACROSS)
        y = below
    yield svg.line(left, y, edge + 44, y, f'stroke="{_QUIET}" stroke-width="0.6"')


def _look(is_across: bool) -> str:
    colour, name = (_ACROSS, "across") if is_across else (_INSIDE, "inside")
    return f'stroke="{colour}" stroke-width="1.4" marker-end="url(#{name})"'


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(), encoding="utf-8")
    print("\n".join(table_lines()))
