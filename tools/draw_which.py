"""Which backend serves which arrays: the picture of docs/which.md, for `tools/draw_pictures.py`.

Questions have white boxes. A backend's box says how far it has been executed, in words and by its
colour. The picture has a light background of its own, for light and dark pages.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from schedules import svg

WIDTH, HEIGHT = 960, 500
WORDS, QUIET, EDGE, PAPER = "#111827", "#4b5563", "#6b7280", "#f9fafb"


class Box(NamedTuple):
    """A question, or a backend; its middle lies at x, its upper edge at y."""

    x: int
    y: int
    width: int
    lines: tuple[str, ...]
    kind: str = "question"

    @property
    def height(self) -> int:
        """Its height, by its lines."""
        return 20 + 19 * len(self.lines)


FILLS: Final = {
    "question": ("#ffffff", "#9ca3af"),
    "measured": ("#d1fae5", "#047857"),
    "once": ("#fef3c7", "#b45309"),
    "never": ("#fee2e2", "#b91c1c"),
}
LEGEND: Final = (
    ("measured", "tested and measured"),
    ("once", "executed in part: one machine, or one GPU"),
    ("never", "never executed on its hardware"),
)
BOXES: Final = {
    "arrays": Box(480, 50, 210, ("Where are the arrays?",)),
    "hosts": Box(180, 150, 230, ("Do ranks run on several hosts?",)),
    "rdma": Box(250, 255, 250, ("Does the network have RDMA?", "InfiniBand, Slingshot, EFA")),
    "cpu": Box(75, 380, 120, ("cpu", "shared memory"), "measured"),
    "tcp": Box(205, 380, 120, ("cpu", "TCP, TLS"), "once"),
    "mpi": Box(335, 380, 120, ("mpi", "needs mpi4py"), "once"),
    "mixed": Box(480, 380, 150, ("direct", "init(mixed=True)"), "once"),
    "own": Box(745, 150, 290, ("Has each rank a GPU of its own,", "and the vendor's library?")),
    "direct": Box(632, 380, 136, ("direct", "shared GPUs, too"), "once"),
    "vendor": Box(815, 265, 150, ("Whose GPUs?",)),
    "nccl": Box(752, 380, 84, ("nccl", "NVIDIA"), "once"),
    "rccl": Box(837, 380, 68, ("rccl", "AMD"), "never"),
    "oneccl": Box(913, 380, 68, ("oneccl", "Intel"), "never"),
}
ARROWS: Final = (
    ("arrays", "hosts", "host memory"),
    ("arrays", "mixed", "both, in one call"),
    ("arrays", "own", "GPUs"),
    ("hosts", "cpu", "no"),
    ("hosts", "rdma", "yes"),
    ("rdma", "tcp", "no"),
    ("rdma", "mpi", "yes"),
    ("own", "direct", "no"),
    ("own", "vendor", "yes"),
    ("vendor", "nccl", ""),
    ("vendor", "rccl", ""),
    ("vendor", "oneccl", ""),
)


def picture() -> str:
    """Return the whole document."""
    parts = [
        svg.head(WIDTH, HEIGHT, "Which backend serves which arrays"),
        f"<defs>{svg.tip('tip', EDGE)}</defs>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="{PAPER}" stroke="#d1d5db"/>',
        svg.text(20, 30, "Which backend serves your arrays", 16, "start", "bold", WORDS),
    ]
    parts += [arrow(BOXES[start], BOXES[end], label) for start, end, label in ARROWS]
    parts += [box(each) for each in BOXES.values()]
    return "\n".join([*parts, *legend(), "</svg>", ""])


def box(each: Box) -> str:
    """Return a box with its lines; the first one of a backend is its name."""
    fill, stroke = FILLS[each.kind]
    frame = (
        f'<rect x="{each.x - each.width / 2:g}" y="{each.y}" width="{each.width}" '
        f'height="{each.height}" rx="6" fill="{fill}" stroke="{stroke}"/>'
    )
    is_name = each.kind != "question"
    lines = [
        svg.text(
            each.x,
            each.y + 24 + 19 * place,
            line,
            15 if is_name and not place else 13,
            weight="bold" if is_name and not place else "normal",
            fill=WORDS if not place or not is_name else QUIET,
        )
        for place, line in enumerate(each.lines)
    ]
    return "\n".join([frame, *lines])


def arrow(start: Box, end: Box, label: str) -> str:
    """Return an arrow from one box down to another, with the answer that it stands for."""
    y1, y2 = start.y + start.height, end.y - 2
    # Arrows leave towards where they go, but within the lower edge.
    reach = start.width / 2 - 18
    x1 = start.x + max(-reach, min(reach, (end.x - start.x) / 2))
    look = f'stroke="{EDGE}" stroke-width="1.5" marker-end="url(#tip)"'
    drawn = svg.line(x1, y1, end.x, y2, look)
    if not label:
        return drawn
    x, y = (x1 + end.x) / 2, (y1 + y2) / 2
    half = 3.5 * len(label) + 4
    edges = f'x="{x - half:g}" y="{y - 11:g}" width="{2 * half:g}" height="18"'
    paper = f'<rect {edges} fill="{PAPER}"/>'
    return "\n".join([drawn, paper, svg.text(x, y + 3, label, 13, fill=QUIET)])


def legend() -> list[str]:
    """Return what the colours mean."""
    parts, x = [], 20
    for kind, words in LEGEND:
        fill, stroke = FILLS[kind]
        parts.append(
            f'<rect x="{x}" y="466" width="16" height="16" rx="3" fill="{fill}" stroke="{stroke}"/>'
        )
        parts.append(svg.text(x + 24, 479, words, 13, "start", fill=QUIET))
        x += 60 + 7 * len(words)
    return parts
