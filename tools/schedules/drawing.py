"""A schedule as a picture: ranks side by side, rounds from top to bottom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpucoll.algorithms.steps import NOBODY, Step, span_numbers
from gpucoll.algorithms.table import Algorithm
from gpucoll.errors import ArgumentError
from schedules.contents import EMPTY, Contents
from schedules.initial import initial_blocks
from schedules.rounds import Round, rounds_of
from schedules.svg import head, line, text, tip

MOST_RANKS: Final = 16
MOST_ROUNDS: Final = 64

_CELL_WIDTH, _CELL_HEIGHT = 12, 14
_BETWEEN = 44  # from one row of blocks to the next, with room for the arrows
_TOP, _LEFT, _BOTTOM = 74, 64, 60
_LEAST_WIDTH = 400  # room for the legend at the bottom
_REDUCES, _COPIES = "#c2410c", "#1d4ed8"
_FULL = (15, 118, 110)


def draw(algorithm: Algorithm, size: int, root: int = 0) -> str:
    """Return a schedule as an SVG document.

    Each rank is a column, with a row of its blocks before the first round and after each round. The
    darker a block, the more ranks have contributed to it. An arrow is a message, with the numbers
    of its blocks: orange if they are reduced, blue if they replace the previous content, dashed if
    they are forwarded as they arrive.

    Parameters
    ----------
    algorithm : Algorithm
        The algorithm to draw.
    size : int
        Number of ranks, at most 16.
    root : int
        The rank that gives or gets everything, if there is one.

    Raises
    ------
    ArgumentError
        There are more than 16 ranks, or more than 64 rounds.
    """
    if size > MOST_RANKS:
        raise ArgumentError(f"a drawing of {size} hosts: at most {MOST_RANKS} can be seen on one")
    contents = Contents()
    before = initial_blocks(algorithm, size, contents, root)
    rounds = rounds_of(algorithm.schedules(size, root), before, contents)
    if len(rounds) > MOST_ROUNDS:
        raise ArgumentError(f"a drawing of {len(rounds)} rounds: at most {MOST_ROUNDS} fit on one")
    canvas = _Canvas(algorithm.blocks(size), size, len(rounds), algorithm.reduces)
    parts = [canvas.head(f"{algorithm.collective.spelled}: {algorithm.name}, {size} ranks")]
    parts += [canvas.blocks(0, before, contents)]
    for number, one in enumerate(rounds):
        parts += [canvas.messages(number, one), canvas.blocks(number + 1, one.held, contents)]
    parts.append(canvas.legend())
    return "\n".join(parts) + "\n</svg>\n"


@dataclass(frozen=True)
class _Canvas:
    """The places and styles of the picture's parts."""

    block_count: int
    size: int
    rounds: int
    reduces: bool

    @property
    def cell_width(self) -> int:
        """The width of a block."""
        return max(_CELL_WIDTH, 30 // self.block_count)

    @property
    def column(self) -> int:
        """The distance between the middles of two neighbouring ranks."""
        return max(76, self.cell_width * self.block_count + 26)

    @property
    def width(self) -> int:
        """The width of the picture."""
        return max(2 * _LEFT + self.column * self.size, _LEAST_WIDTH)

    @property
    def height(self) -> int:
        """The height of the picture."""
        return self.row(self.rounds) + _CELL_HEIGHT + _BOTTOM

    def middle(self, rank: int) -> float:
        """Return the x of a rank."""
        return _LEFT + self.column * (rank + 0.5)

    def row(self, number: int) -> int:
        """Return the y of the blocks after `number` rounds."""
        return _TOP + number * (_CELL_HEIGHT + _BETWEEN)

    def head(self, title: str) -> str:
        """Return the beginning of the document, with the names of ranks and rounds."""
        parts = [
            head(self.width, self.height, title),
            "<defs>" + tip("reduces", _REDUCES) + tip("copies", _COPIES) + "</defs>",
            '<rect width="100%" height="100%" fill="white"/>',
            text(16, 26, title, size=16, anchor="start", weight="bold"),
        ]
        parts += [
            text(self.middle(rank), _TOP - 12, f"rank {rank}", size=12) for rank in range(self.size)
        ]
        for number in range(self.rounds):
            y = self.row(number) + _CELL_HEIGHT + _BETWEEN / 2 + 4
            parts.append(text(12, y, f"{number}", size=11, anchor="start", fill="#6b7280"))
        return "\n".join(parts)

    def blocks(self, number: int, held: Sequence[Sequence[int]], contents: Contents) -> str:
        """Return the blocks of all ranks after `number` rounds."""
        parts = []
        for rank, values in enumerate(held):
            left = self.middle(rank) - self.cell_width * self.block_count / 2
            for block, value in enumerate(values):
                parts.append(
                    f'<rect x="{left + block * self.cell_width:g}" y="{self.row(number)}" '
                    f'width="{self.cell_width}" height="{_CELL_HEIGHT}" '
                    f'fill="{self.shade(value, contents)}" stroke="#6b7280" stroke-width="0.8"/>'
                )
        return "\n".join(parts)

    def shade(self, value: int, contents: Contents) -> str:
        """Return a colour, darker the more ranks have contributed."""
        if value == EMPTY:
            return "white"
        share = len(contents.contributions(value)) / self.size if self.reduces else 1
        weight = 0.18 + 0.82 * share
        return "#" + "".join(f"{round(255 - (255 - part) * weight):02x}" for part in _FULL)

    def messages(self, number: int, one: Round) -> str:
        """Return the arrows of a round."""
        parts = []
        senders = {rank: step for rank, step in one.steps.items() if step.send_to != NOBODY}
        is_ring = self.size > 2 and len(senders) == self.size
        for rank, step in senders.items():
            across = is_ring and abs(rank - step.send_to) == self.size - 1
            parts += self.arrow(number, rank, step, one.steps[step.send_to].reduces, across)
        return "\n".join(parts)

    def arrow(self, number: int, rank: int, step: Step, reduces: bool, across: bool) -> list[str]:
        """Return the arrow of a message with its label; two parts if it goes across the ends."""
        top = self.row(number) + _CELL_HEIGHT + 2
        bottom = self.row(number + 1) - 3
        start, end = self.middle(rank), self.middle(step.send_to)
        look = _look(reduces, step.forwards)
        label = span_numbers(step.send)
        if not across:
            return _labelled(start, top, end, bottom, look, label)
        way = min(self.column * 0.72, self.column / 2 + _LEFT - 26)
        way = way if rank > step.send_to else -way
        half = (top + bottom) / 2
        return [
            line(start, top, start + way, half, _look(reduces, step.forwards, has_tip=False)),
            *_labelled(end - way, half, end, bottom, look, ""),
            *_label(start, top, start + way, half, label),
        ]

    def legend(self) -> str:
        """Return the legend of colours and dashes."""
        y = self.height - 30
        entries = (
            ("reduces", _look(True, False)),
            ("replaces", _look(False, False)),
            ("forwards as it comes", _look(False, True)),
        )
        parts, x = [], 16.0
        for words, look in entries:
            parts.append(line(x, y - 4, x + 28, y - 4, look))
            parts.append(text(x + 36, y, words, size=11, anchor="start"))
            x += 56 + 6.2 * len(words)
        words = "the darker, the more ranks are in it" if self.reduces else "filled: it is there"
        parts.append(text(16, y + 18, words, size=11, anchor="start", fill="#0f766e"))
        return "\n".join(parts)


def _look(reduces: bool, forwards: bool, has_tip: bool = True) -> str:
    """Return the attributes of an arrow."""
    colour, name = (_REDUCES, "reduces") if reduces else (_COPIES, "copies")
    dashes = ' stroke-dasharray="5 3"' if forwards else ""
    end = f' marker-end="url(#{name})"' if has_tip else ""
    return f'stroke="{colour}" stroke-width="1.4"{dashes}{end}'


def _labelled(x1: float, y1: float, x2: float, y2: float, look: str, label: str) -> list[str]:
    """Return a line with a label near its beginning."""
    return [line(x1, y1, x2, y2, look), *_label(x1, y1, x2, y2, label)]


def _label(x1: float, y1: float, x2: float, y2: float, label: str) -> list[str]:
    """Return a label near the beginning of a line, or nothing."""
    if not label:
        return []
    along = min(0.27, 26 / max(1.0, abs(x2 - x1)))
    x, y = x1 + along * (x2 - x1), y1 + along * (y2 - y1) + 4
    room = 6.4 * len(label) + 4  # the line is interrupted for the text
    back = f'<rect x="{x - room / 2:g}" y="{y - 9:g}" width="{room:g}" height="11" fill="white"/>'
    return [back, text(x, y, label, size=10)]
