"""Draw the pictures of the README and of docs/ again.

::

    python tools/draw_pictures.py               # all of them
    python tools/draw_pictures.py headline calls

draws all pictures, or those whose names begin so. Pictures of results need matplotlib
(``pip install 'gpucoll[plot]'``); each comes from the newest file of its kind in bench/results, in
a light and a dark form, and its metadata has the digest of what it shows. A picture without results
is left out. `examples/federated_digits.py` draws its own picture, because it trains for it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import draw_gpu_ring
import draw_prediction
import draw_slow_links
import draw_which
from schedules.drawing import draw as draw_schedule

from gpucoll.algorithms.table import named
from gpucoll.bench.pictures import (
    NothingToDrawError,
    Picture,
    bar_of,
    calls_of,
    digest_of,
    headline,
    heat_map,
    lines,
    save,
    small_multiples,
)
from gpucoll.bench.pictures.headline import Bar
from gpucoll.collectives import Collective

__all__ = ["Drawing", "drawings", "main"]

ROOT: Final = Path(__file__).resolve().parents[1]
DOCS: Final = ROOT / "docs"
IMAGES: Final = DOCS / "images"
RESULTS: Final = ROOT / "bench/results"
ALL_REDUCE: Final = "all_reduce float32 sum"
VARIANTS: Final = ("gpucoll symmetric", "gpucoll-plan", "limit")
"""What the README's picture leaves out, which its readers do not know."""
BARS: Final = (
    ("all_reduce, 4 B", ALL_REDUCE, 4, "in_place"),
    ("all_reduce, 64 KiB", ALL_REDUCE, 64 << 10, "in_place"),
    ("all_reduce, 64 MiB", ALL_REDUCE, 64 << 20, "in_place"),
    ("training step", "ddp_step float32 avg", 100_712_448, "in_place"),
    ("start of a program", "startup", 0, "out_of_place"),
)
"""The headline: label, call, bytes and side."""


class Drawing(NamedTuple):
    """A picture of results: its file, and what of `gpucoll.bench.pictures` draws it."""

    path: Path
    function: Callable[..., Picture]
    arguments: tuple[Any, ...]

    @property
    def digest(self) -> str:
        """What the picture must have been drawn from."""
        return digest_of(self.function, *self.arguments)


def drawings() -> Iterator[Drawing]:
    """Yield the pictures of results for which there are results."""
    peers, calls = newest("all_reduce-2-ranks"), newest("all-2-ranks")
    steps, starts = newest("ddp_step-2-ranks"), newest("startup-2-ranks")
    for theme in ("light", "dark"):
        if peers:
            of_peers = peers, ALL_REDUCE, "in_place", "time", theme, VARIANTS
            yield Drawing(IMAGES / f"all_reduce-{theme}.svg", lines, of_peers)
        if calls:
            for side in ("in_place", "out_of_place"):
                yield Drawing(IMAGES / f"ratios_{side}-{theme}.svg", heat_map, (calls, side, theme))
            yield Drawing(IMAGES / f"calls-{theme}.svg", small_multiples, (calls, theme))
            contents = [content for content in (calls, steps, starts) if content]
            origin = calls_of(calls)[ALL_REDUCE].origin
            of_bars = list(bars(contents)), theme, origin
            yield Drawing(IMAGES / f"headline-{theme}.svg", headline, of_bars)


def newest(kind: str) -> dict[str, Any] | None:
    """Return the newest results of a kind; None if there are none."""
    paths = sorted(RESULTS.glob(f"????-??-??-{kind}.json"))
    content: dict[str, Any] = json.loads(paths[-1].read_text("utf-8")) if paths else {}
    return content or None


def bars(contents: Sequence[dict[str, Any]]) -> Iterator[Bar]:
    """Yield the bars of the headline that were measured, each from the first file that has it."""
    for label, call, size_bytes, side in BARS:
        for content in contents:  # one by one: they may be of different kinds of arrays
            try:
                yield bar_of(content, call, size_bytes, side, label)
            except NothingToDrawError:
                continue
            break


def draw_slow_links_picture(path: Path) -> None:
    """Draw the picture of docs/slow_links.md."""
    found = json.loads((DOCS / "slow_links.json").read_text(encoding="utf-8"))
    path.write_text(draw_slow_links.draw(found), encoding="utf-8")


def draw_backends(path: Path) -> None:
    """Draw the picture of docs/which.md."""
    path.write_text(draw_which.picture(), encoding="utf-8")


def draw_predictions(path: Path) -> None:
    """Draw a picture of docs/prediction.md, whose theme its name tells."""
    if content := newest("prediction"):
        save(draw_prediction.drawn(content, path.stem.rpartition("-")[2]), path)


def draw_ring_of_gpus(path: Path) -> None:
    """Draw the picture of docs/gpu.md."""
    path.write_text(draw_gpu_ring.draw(), encoding="utf-8")


def draw_ring_of_hosts(path: Path) -> None:
    """Draw the picture of docs/algorithms.md."""
    ring = named(Collective.ALL_REDUCE, "ring")
    path.write_text(draw_schedule(ring, 4), encoding="utf-8")


OTHERS: Final = {
    IMAGES / "slow_links.svg": draw_slow_links_picture,
    IMAGES / "which_backend.svg": draw_backends,
    IMAGES / "prediction-light.svg": draw_predictions,
    IMAGES / "prediction-dark.svg": draw_predictions,
    DOCS / "gpu_ring.svg": draw_ring_of_gpus,
    DOCS / "algorithms_ring.svg": draw_ring_of_hosts,
}
"""Pictures whose files have no digest."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Draw the pictures of the documents again.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginnings of names (all)")
    wanted = tuple(parser.parse_args(arguments).names) or ("",)
    chosen = [one for one in drawings() if one.path.name.startswith(wanted)]
    others = {path: draw for path, draw in OTHERS.items() if path.name.startswith(wanted)}
    if not chosen and not others:
        parser.error(f"no picture's name begins with {' or '.join(wanted)}")
    try:
        for path, function, given in chosen:
            save(function(*given), path)
            print(path.relative_to(ROOT))
        for path, draw in others.items():
            draw(path)
            print(path.relative_to(ROOT))
    except (OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
