"""Pictures as files, and as SVG inside a page."""

from __future__ import annotations

import importlib.util
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from xml.sax.saxutils import escape, quoteattr

from gpucoll.bench.pictures.theme import settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SUFFIXES", "Picture", "save", "to_svg", "why_not"]

SUFFIXES: Final = (".svg", ".png", ".pdf")
PNG_DPI: Final = 192  # 1600 pixels in a width of 600 pt
SVG_NAMESPACE: Final = "http://www.w3.org/2000/svg"


@dataclass(frozen=True)
class Picture:
    """A drawing, and what it shows in words.

    Attributes
    ----------
    figure : matplotlib.figure.Figure
        The drawing.
    title, description : str
        For those who cannot see it.
    digest : str
        What it was drawn from: see `series.digest_of`.
    """

    figure: Figure
    title: str
    description: str
    digest: str


def why_not(path: Path) -> str | None:
    """Return why no picture can be saved at a path, and what to do; None if it can.

    Nothing is written, and matplotlib is not imported.
    """
    if path.suffix.lower() not in SUFFIXES:
        return f"{path}: the name must end with {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
    if importlib.util.find_spec("matplotlib") is None:
        return f"{path}: a picture needs matplotlib: pip install 'gpucoll[plot]'"
    return None


def save(picture: Picture, path: Path) -> None:
    """Write a picture; the suffix chooses the format.

    The same picture gives the same bytes with the same matplotlib.

    Raises
    ------
    ValueError
        The suffix is none of `SUFFIXES`, or matplotlib is missing.
    OSError
        The file cannot be written.
    """
    if reason := why_not(path):
        raise ValueError(reason)
    if path.suffix.lower() == ".svg":
        text = f'<?xml version="1.0" encoding="utf-8"?>\n{to_svg(picture, "picture")}\n'
        path.write_text(text, encoding="utf-8")
        return
    stream = io.BytesIO()
    with settings():
        if path.suffix.lower() == ".png":
            picture.figure.savefig(stream, format="png", dpi=PNG_DPI)
        else:
            about = {"Title": picture.title, "Subject": picture.description, "CreationDate": None}
            picture.figure.savefig(stream, format="pdf", metadata=about)
    path.write_bytes(stream.getvalue())


def to_svg(picture: Picture, ids: str) -> str:
    """Return a picture as one ``<svg>`` element, which a page may contain as it is.

    Its text is text, its title and description are those of the picture, and its ``<metadata>``
    has the digest and the version of matplotlib. The same picture gives the same text.

    Parameters
    ----------
    picture : Picture
        The picture.
    ids : str
        The beginning of all its ids: letters, digits and hyphens, another one for each picture of
        a page.
    """
    import matplotlib

    stream = io.StringIO()
    with settings():
        matplotlib.rcParams["svg.hashsalt"] = "gpucoll"
        picture.figure.savefig(stream, format="svg", metadata={"Date": None})
    drawn = stream.getvalue()
    _, _, body = drawn[drawn.index("<svg") :].partition(">")
    # Its style would be that of all elements of a page.
    for element in ("metadata", "style"):
        body = re.sub(rf"\s*<{element}.*?</{element}>", "", body, count=1, flags=re.DOTALL)
    used = {*re.findall(r'href="#([^"]+)"', body), *re.findall(r"url\(#([^)]+)\)", body)}

    def own_id(match: re.Match[str]) -> str:
        return f' id="{ids}-{match[1]}"' if match[1] in used else ""

    body = re.sub(r' id="([^"]+)"', own_id, body)
    body = re.sub(r' (?:d|x|y|transform)="[^"]*"', _shorter, body)
    body = re.sub(r"\n +<", "\n<", body)
    # Fonts that are as wide or narrower, where a reader's machine lacks matplotlib's.
    body = body.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    body = re.sub(r'href="#|url\(#', lambda match: f"{match[0]}{ids}-", body)
    width_pt, height_pt = (round(72 * inches, 2) for inches in picture.figure.get_size_inches())
    about = f"sha256 {picture.digest}, matplotlib {matplotlib.__version__}"
    return (
        f'<svg xmlns="{SVG_NAMESPACE}" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{width_pt / 0.75:g}" height="{height_pt / 0.75:g}" '
        f'viewBox="0 0 {width_pt:g} {height_pt:g}" stroke-linejoin="round" role="img" '
        f"aria-labelledby={quoteattr(f'{ids}-title {ids}-description')}>\n"
        f'<title id="{ids}-title">{escape(picture.title)}</title>\n'
        f'<desc id="{ids}-description">{escape(picture.description)}</desc>\n'
        f"<metadata>{about}</metadata>{body.rstrip()}"
    )


def _shorter(attribute: re.Match[str]) -> str:
    """Return a path or place on one line, with tenths of a point, for fewer bytes."""
    text = re.sub(r"\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", attribute[0])
    return " ".join(text.split("\n")).replace("  ", " ").replace(' "', '"')
