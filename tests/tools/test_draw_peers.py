"""The pictures of times over sizes: what is drawn where, and that the README's is up to date."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import draw_peers  # noqa: E402

sys.path.remove(str(ROOT / "tools"))

SVG = "{http://www.w3.org/2000/svg}"


def entry(library: str, size: int, time: float, **others: object) -> dict[str, object]:
    return {
        "library": library,
        "placement": "private",
        "collective": "all_reduce",
        "type": "float32",
        "redop": "sum",
        "size": size,
        "in_place": {"time": time},
        "out_of_place": None,
        **others,
    }


def content(*entries: dict[str, object]) -> dict[str, object]:
    environment = {"ranks": 2, "usable_cpus": 2, "cpu": "A & B", "date": "2026-11-21T10:00:00"}
    return {"results": list(entries), "environment": environment}


TWO = [
    entry("gpucoll", 64, 2.0),
    entry("gpucoll", 4, 1.0),
    entry("impi", 4, 10.0),
    entry("impi", 64, 100.0),
    entry("gpucoll", 4, 0.5, placement="symmetric"),
]


def drawn(*entries: dict[str, object]) -> ElementTree.Element:
    theme = draw_peers.THEMES["light"]
    picture = draw_peers.picture(content(*entries), "in_place", theme)
    return ElementTree.fromstring(picture.document())


def words_of(document: ElementTree.Element) -> list[str]:
    return [one.text or "" for one in document.iter(f"{SVG}text")]


def test_each_library_is_a_line_over_sizes():
    lines = [one.attrib["points"].split() for one in drawn(*TWO).iter(f"{SVG}polyline")]
    places = [[tuple(map(float, point.split(","))) for point in points] for points in lines]
    (left, peers), (right, peers_last) = places[0]
    (own_left, own), (own_right, own_last) = places[1]  # gpucoll's comes last, and so on top
    assert (left, right) == (own_left, own_right) == (draw_peers.LEFT, draw_peers.RIGHT)
    assert peers_last == draw_peers.TOP
    assert peers - peers_last == pytest.approx(own - peers, abs=0.2)  # a factor of ten each
    assert own_last < own < draw_peers.BOTTOM


def test_words():
    words = words_of(drawn(*TWO))
    assert words[0] == "all_reduce between 2 processes"
    assert words[1] == "float32 sum, in place, on 2 CPUs of one host. Lower is better."
    assert {"A & B, 2026-11-21", "Intel MPI 100 µs", "gpucoll 2 µs", "4 B", "64 B"} <= {*words}
    assert {"1 µs", "10 µs", "100 µs"} <= {*words}


@pytest.mark.parametrize(
    ("time_us", "text"),
    [(0.38, "380 ns"), (0.999, "1000 ns"), (1.0, "1 µs"), (6593.9, "6.6 ms"), (2.5e6, "2.5 s")],
)
def test_times(time_us: float, text: str):
    assert draw_peers.time_text(time_us) == text


@pytest.mark.parametrize("wanted", [[10.0, 12.0, 13.0, 100.0], [10.0, 50.0, 100.0], [7.0] * 5])
def test_labels_do_not_overlap(wanted: list[float]):
    placed = draw_peers.spread(wanted)
    assert all(b - a >= draw_peers.LABEL_PITCH for a, b in pairwise(placed))
    assert sum(placed) == pytest.approx(sum(wanted))


@pytest.mark.parametrize(
    "entries",
    [
        TWO[:2],
        TWO[2:4],
        [TWO[1], TWO[2]],
        [*TWO, entry("gpucoll", 4, 1.0, collective="reduce")],
        [],
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path: Path, capsys, entries):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(content(*entries)))
    assert draw_peers.main([str(path), str(tmp_path / "picture")]) == 2
    assert str(path) in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [path]


def test_the_pictures_in_docs_are_drawn_from_the_newest_result(tmp_path: Path):
    results = sorted((ROOT / "bench/results").glob("*-all_reduce-2-ranks.json"))
    assert draw_peers.main([str(results[-1]), str(tmp_path / "all_reduce")]) == 0
    for name in draw_peers.THEMES:
        file = f"all_reduce-{name}.svg"
        assert (tmp_path / file).read_bytes() == (ROOT / "docs/images" / file).read_bytes(), (
            f"draw again: python tools/draw_peers.py {results[-1].relative_to(ROOT)} "
            "docs/images/all_reduce"
        )
