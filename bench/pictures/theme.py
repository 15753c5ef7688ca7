"""How pictures look: colours, marks and type, for a light page, a dark page, and paper or slides.

gpucoll's lines have colours of Okabe and Ito, which the colour-blind tell apart. Peers are grey;
each has its own mark and shade, the same in every picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FONT_PT", "THEMES", "Look", "Theme", "blank", "blend", "contrast", "settings"]

FONT_PT: Final = 11.0
"""The smallest type; a picture is 600 pt wide, that is 800 px."""
_OWN: Final = ("gpucoll", "gpucoll symmetric", "gpucoll-plan", "gpucoll torch", "gpucoll-list")
_MARKS: Final = {
    "impi": "o",
    "openmpi": "s",
    "mpich": "^",
    "gloo": "D",
    "cupy-nccl": "v",
    "torch-nccl": "P",
}
_OTHER_MARKS: Final = "Xp*h"


@dataclass(frozen=True)
class Look:
    """How one library's line is drawn; `marker` is matplotlib's."""

    colour: str
    marker: str
    dashes: Any
    width_pt: float


@dataclass(frozen=True)
class Theme:
    """The colours for one kind of page.

    Attributes
    ----------
    background : str or None
        The colour behind the picture; None for a transparent one.
    words, quiet, grid : str
        Headings; other words; lines of the grid.
    own, peers : tuple of str
        Colours of gpucoll's lines, and greys of the peers'.
    faster, slower : str
        Where gpucoll is faster than the best peer, and where a peer is faster.
    """

    background: str | None
    words: str
    quiet: str
    grid: str
    own: tuple[str, ...]
    peers: tuple[str, ...]
    faster: str
    slower: str

    def look(self, title: str, kind: str) -> Look:
        """Return how to draw a line by its name in the table, and its kind (`series.KINDS`)."""
        if kind == "limit":
            return Look(self.quiet, "", (0, (4, 3)), 1.2)
        if kind == "own":
            place = _OWN.index(title) if title in _OWN else len(title)
            dashes = "-" if title == "gpucoll" else (0, (6, 1.5))
            width_pt = 2.6 if title == "gpucoll" else 1.8
            return Look(self.own[place % len(self.own)], "", dashes, width_pt)
        names = list(_MARKS)
        place = names.index(title) if title in names else len(title)
        marker = _MARKS.get(title, _OTHER_MARKS[place % len(_OTHER_MARKS)])
        return Look(self.peers[place % len(self.peers)], marker, "-", 1.2)


_LIGHT = Theme(
    background=None,
    words="#1f2328",
    quiet="#59636e",
    grid="#d1d9e0",
    own=("#0072b2", "#d55e00", "#009e73", "#b8618f", "#a87400"),
    peers=("#4b535c", "#7a838d", "#626b75", "#98a1aa"),
    faster="#0072b2",
    slower="#d55e00",
)
THEMES: Final = {
    "light": _LIGHT,
    "dark": Theme(
        background=None,
        words="#f0f6fc",
        quiet="#9198a1",
        grid="#30363d",
        own=("#56b4e9", "#f0883e", "#2fbf97", "#e3a3c6", "#f0c04a"),
        peers=("#c9d1d9", "#8b949e", "#aab2bb", "#6e7681"),
        faster="#56b4e9",
        slower="#f0883e",
    ),
    "print": Theme(**{**vars(_LIGHT), "background": "#ffffff"}),
}
"""The themes by name: "light" and "dark" have a transparent background, "print" a white one."""


def blend(first: str, second: str, share: float) -> str:
    """Return the colour that lies this share of the way from the first to the second."""
    pairs = zip(bytes.fromhex(first[1:]), bytes.fromhex(second[1:]), strict=True)
    return "#" + bytes(round(a + share * (b - a)) for a, b in pairs).hex()


def contrast(first: str, second: str) -> float:
    """Return the contrast of two colours by WCAG 2: 1 to 21; text needs 4.5."""
    dark, light = sorted((_luminance(first), _luminance(second)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    shares = [value / 255 for value in bytes.fromhex(colour[1:])]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@contextmanager
def settings() -> Iterator[None]:
    """Let matplotlib use its own defaults and a few settings of ours, not the user's."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "font.family": ["DejaVu Sans"],
                "font.size": FONT_PT,
                "svg.fonttype": "none",  # text as text
                "pdf.fonttype": 42,  # text that can be searched
                "text.parse_math": False,  # dollar signs in names are no formulas
            }
        )
        yield


def blank(theme: Theme, width_pt: float, height_pt: float) -> Figure:
    """Return an empty figure whose unit for `Figure.add_axes` is the share of its size."""
    from matplotlib.figure import Figure

    colour = theme.background or "none"
    return Figure(figsize=(width_pt / 72, height_pt / 72), dpi=72, facecolor=colour)
