"""Pictures as matplotlib draws them; without it these tests are skipped."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

matplotlib = pytest.importorskip("matplotlib", reason="pictures need matplotlib")

from gpucoll.bench import cli  # noqa: E402
from gpucoll.bench.estimates import Ratio  # noqa: E402
from gpucoll.bench.pictures import (  # noqa: E402
    THEMES,
    Bar,
    NothingToDrawError,
    headline,
    heat_map,
    lines,
    overview,
    save,
    small_multiples,
    to_svg,
)
from gpucoll.bench.pictures.theme import FONT_PT, settings  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
CALL = "all_reduce float32 sum"
SIZES = [4 << 4 * step for step in range(7)]
LIBRARIES = ("gpucoll", "gpucoll-plan", "mpich", "openmpi", "impi", "gloo", "somebody's")


def all_contents(make):
    """Return results of every kind by name."""
    row, content = make

    def rows(sizes, libraries, **others):
        return [
            row(name, size, (3 + size / 1000) * (1 + number), in_place=2.0 + number, **others)
            for size in sizes
            for number, name in enumerate(libraries)
        ]

    limits = tuple(row("limit", size, 1 + size / 2000, in_place=1.0) for size in SIZES)
    full = rows(SIZES, LIBRARIES)
    figures = {"joined_s": 0.3, "communicator_address_space_bytes": 7.0**12}
    others = rows(SIZES, LIBRARIES, collective="exclusive_scan")
    barrier = rows([0], LIBRARIES, collective="barrier")
    dtypes = ("bool", "int8", "bfloat16", "complex128")
    of_types = rows([4, 64], LIBRARIES[:3], collective="exclusive_scan")
    many = [replace(one, dtype=dtype) for one in of_types for dtype in dtypes]
    test = {"array": "host-device", "test_device": "a note"}
    return {
        "many dtypes": content(*many),
        "a test device": content(*full, **test),
        "one call": content(*full, limits=limits),
        "one size": content(*rows([1000], LIBRARIES)),
        "one library": content(*rows(SIZES, ["gpucoll"])),
        "one value": content(*rows([4], ["gpucoll"])),
        "one rank": content(*rows(SIZES, ["gpucoll", "cupy-nccl"], ranks=1), array="cupy"),
        "several calls": content(*full, *others, *barrier, limits=limits),
        "figures": content(*rows([0], LIBRARIES[:3], collective="startup", figures=figures)),
        "zeros": content(row("gpucoll", 4, 0.0), row("gpucoll", 64, 1.0), row("mpich", 4, 0.0)),
        "from 0": content(row("gpucoll", 4, 1.0), row("mpich", 64, 1e9, in_place=1e-3)),
    }


def drawings(make):
    """Yield a name and a picture for each kind of picture of each kind of results."""
    for name, content in all_contents(make).items():
        yield f"overview, {name}", overview(content)
        yield f"small multiples, {name}", small_multiples(content, "dark")
        for quantity in ("time", "bus_bw"):
            try:
                yield f"{quantity}, {name}", lines(content, CALL, "out_of_place", quantity)
            except NothingToDrawError:
                continue
    contents = all_contents(make)
    yield "heat map", heat_map(contents["several calls"], "in_place", "dark")
    yield "heat map of dtypes", heat_map(contents["many dtypes"], "in_place")
    yield "heat map of one column", heat_map(contents["one size"], "in_place")
    bars = [Bar("a call, 4 B", Ratio(0.5, 0.4, 0.6), "a peer"), Bar("b", Ratio(3, 2, 4), "another")]
    yield "headline", headline(bars, "print", "a machine")
    yield "headline of one bar", headline(bars[:1])


def texts_of(figure):
    """Return each visible text of a figure that is not empty, with its box in points."""
    figure.draw_without_rendering()
    found = [one for one in figure.findobj(matplotlib.text.Text) if one.get_text().strip()]
    return [(one, one.get_window_extent()) for one in found if one.get_visible()]


def test_texts_are_legible_inside_and_apart(make):
    for name, picture in drawings(make):
        figure = picture.figure
        with settings():
            found = texts_of(figure)
        assert found, name
        for number, (text, box) in enumerate(found):
            which = f"{name}: {text.get_text()!r}"
            assert text.get_fontsize() >= FONT_PT, which
            assert 0 <= box.x0 <= box.x1 <= figure.bbox.width, which
            assert 0 <= box.y0 <= box.y1 <= figure.bbox.height, which
            for other, its_box in found[:number]:
                width = min(box.x1, its_box.x1) - max(box.x0, its_box.x0)
                height = min(box.y1, its_box.y1) - max(box.y0, its_box.y0)
                assert min(width, height) < 3, f"{which} lies on {other.get_text()!r}"


def said(svg, name):
    """Return the text of an element of an SVG document."""
    return svg.findtext(f"{SVG}{name}") or ""


def test_svg_in_a_page(make):
    content = all_contents(make)["several calls"]
    picture = small_multiples(content)
    texts = [to_svg(picture, "first"), to_svg(overview(content), "second")]
    assert to_svg(small_multiples(content), "first") == texts[0]  # the same each time
    page = ElementTree.fromstring(f"<body>{''.join(texts)}</body>")
    ids = [one.attrib["id"] for one in page.iter() if "id" in one.attrib]
    assert len(ids) == len({*ids})
    used = {*re.findall(r'href="#([^"]+)"', "".join(texts))}
    used |= {*re.findall(r"url\(#([^)]+)\)", "".join(texts))}
    assert used <= {*ids}
    assert not list(page.iter(f"{SVG}style"))  # it would hold for the whole page
    svg = page[0]
    assert svg.attrib["aria-labelledby"] == f"{svg[0].attrib['id']} {svg[1].attrib['id']}"
    title, description, metadata = (said(svg, name) for name in ("title", "desc", "metadata"))
    assert title == "Time of one call between 2 processes"
    assert "all_reduce, out of place, time of one call. gpucoll: 3 µs at 4 B" in description
    assert f"sha256 {picture.digest}," in metadata
    words = [one.text for one in page.iter(f"{SVG}text")]
    assert all("sans-serif" in one.attrib["style"] for one in page.iter(f"{SVG}text"))
    origin = "With 95 % intervals. A <CPU> & more, 2030-01-02"
    assert {"all_reduce, out of place", "Intel MPI", origin} <= {*words}


def test_files(make, tmp_path):
    picture = lines(all_contents(make)["one call"], CALL, "in_place", theme="print")
    for suffix, start in ((".svg", b"<?xml"), (".PNG", b"\x89PNG"), (".pdf", b"%PDF")):
        paths = [tmp_path / f"{name}{suffix}" for name in ("a", "b")]
        for path in paths:
            save(picture, path)
        first, second = (path.read_bytes() for path in paths)
        assert first.startswith(start)
        assert first == second
    with pytest.raises(ValueError, match=r"it\.gif: the name must end with"):
        save(picture, Path("it.gif"))


def test_the_command_draws_what_it_measured(on_double, tmp_path, capfd):
    path = tmp_path / "it.svg"
    arguments = ["--ranks", "2", "-b", "4", "-e", "64", "-f", "16", "-n", "1", "--rounds", "2"]
    assert cli.main([*arguments, "--plot", str(path)]) == 0
    svg = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    assert said(svg, "title") == "all_reduce between 2 processes"
    assert capfd.readouterr().err == ""


def test_settings_of_the_user_are_neither_used_nor_changed(make):
    content = all_contents(make)["one call"]
    plain = to_svg(lines(content, CALL, "in_place"), "it")
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path", "axes.grid": True}):
        # "backend" is chosen when it is read, which imports pyplot
        names = [name for name in matplotlib.rcParams if name != "backend"]
        before = {name: matplotlib.rcParams[name] for name in names}
        assert to_svg(lines(content, CALL, "in_place"), "it") == plain
        assert "matplotlib.pyplot" not in sys.modules
        assert {name: matplotlib.rcParams[name] for name in names} == before


@pytest.mark.soak
@pytest.mark.parametrize("name", ["$x_{$", "n" * 70, "</svg><b>"])
def test_any_name_can_be_drawn(make, name):
    row, content = make
    made = content(row("gpucoll", 4, 2.0), row(name, 4, 3.0))
    found = ElementTree.fromstring(to_svg(overview(made), "a"))
    assert any(name in (one.text or "") for one in found.iter(f"{SVG}text"))


def test_a_line_lies_where_its_values_are(make):
    row, content = make
    rows = [row("gpucoll", 4, 1.0), row("gpucoll", 64, 10.0), row("mpich", 4, 10.0)]
    figure: Any = lines(content(*rows), CALL, "out_of_place").figure
    axes = next(axes for axes in figure.axes if axes.get_xscale() == "log")
    drawn = {tuple(line.get_ydata()): line for line in axes.lines}
    own, peer = drawn[1.0, 10.0], drawn[10.0,]
    assert tuple(own.get_xdata()) == (4, 64)
    assert own.get_color() == THEMES["light"].own[0]
    assert peer.get_color() in THEMES["light"].peers
    assert own.get_zorder() >= peer.get_zorder()
    assert axes.lines.index(own) > axes.lines.index(peer)
    assert axes.get_yscale() == "log"
    band = axes.collections[-1]
    edges = band.get_paths()[0].vertices
    assert edges[:, 1].min() == pytest.approx(0.9)
    assert edges[:, 1].max() == pytest.approx(11.0)


def test_a_faster_peer_is_bold_and_framed(make):
    row, content = make
    rows = [
        row(name, size, time)
        for name, size, time in (
            ("gpucoll", 4, 1.0),
            ("mpich", 4, 2.0),
            ("gpucoll", 64, 6.0),
            ("mpich", 64, 2.0),
        )
    ]
    figure = heat_map(content(*rows), "out_of_place").figure  # fmt: skip
    (axes,) = figure.axes
    texts = {one.get_text(): one for one in axes.texts}
    assert texts["3.00"].get_fontweight() == "bold"
    assert texts["0.50"].get_fontweight() == "normal"
    framed = [one for one in axes.patches if one.get_linewidth() == 2.0]
    assert len(framed) == 1
