"""The parts of an SVG document that every picture of the project is made of."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

_FONT = "font-family='sans-serif'"


def head(width: int, height: int, title: str) -> str:
    """Return the beginning of a document; screen readers read out its title."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label={quoteattr(title)}>\n'
        f"<title>{escape(title)}</title>"
    )


def line(x1: float, y1: float, x2: float, y2: float, look: str) -> str:
    """Return a line; `look` are its attributes."""
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" {look}/>'


def tip(name: str, colour: str) -> str:
    """Return the tip of arrows of a colour, for `marker-end`."""
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
        f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{colour}"/></marker>'
    )


def text(
    x: float,
    y: float,
    words: str,
    size: float,
    anchor: str = "middle",
    weight: str = "normal",
    fill: str = "#111827",
) -> str:
    """Return a line of text, whose baseline is at `y`."""
    return (
        f'<text x="{x:g}" y="{y:g}" {_FONT} font-size="{size:g}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{fill}">{escape(words)}</text>'
    )
