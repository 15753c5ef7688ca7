"""The pictures of the documents show the newest results."""

from __future__ import annotations

import re
from pathlib import Path

import draw_pictures
import numpy as np
import pytest
import write_tables

from gpucoll.bench.pictures import save
from gpucoll.bench.results import Measurement, Results, Row

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DRAWINGS = list(draw_pictures.drawings())


@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda one: one.path.name)
def test_a_picture_is_drawn_from_the_newest_result(drawing):
    # Their bytes depend on matplotlib's version; see the next test. If a document shows a picture
    # that is missing, tests/test_docs.py says so.
    if drawing.path.exists():
        (digest,) = re.findall(r"<metadata>sha256 (\w+),", drawing.path.read_text("utf-8"))
        assert digest == drawing.digest, "draw again: python tools/draw_pictures.py"


@pytest.mark.soak
@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda one: one.path.name)
def test_a_picture_is_what_is_drawn(drawing, tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    kept = drawing.path.read_text(encoding="utf-8") if drawing.path.exists() else ""
    if f"matplotlib {matplotlib.__version__}<" not in kept:
        pytest.skip("the picture was drawn by another version of matplotlib, or never")
    save(drawing.function(*drawing.arguments), tmp_path / "it.svg")
    assert kept == (tmp_path / "it.svg").read_text("utf-8"), (
        "draw again: python tools/draw_pictures.py"
    )


def test_the_readmes_pictures_are_among_them():
    paths = {one.path.relative_to(ROOT).as_posix() for one in DRAWINGS}
    assert {*re.findall(r'(?:src|srcset)="(docs/images/[^"]+)"', README)} <= paths


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Return a folder for results, and let the tool draw into another one."""
    results, docs = tmp_path / "results", tmp_path / "docs"
    monkeypatch.setattr(write_tables, "RESULTS", results)
    write_tables.newest.cache_clear()
    monkeypatch.setattr(draw_pictures, "IMAGES", docs)
    monkeypatch.setattr(draw_pictures, "ROOT", tmp_path)
    monkeypatch.setattr(draw_pictures, "OTHERS", {})
    results.mkdir()
    docs.mkdir()
    yield results
    write_tables.newest.cache_clear()


def row(collective: str, library: str, size: int, time_us: float) -> Row:
    side = Measurement(np.full((2, 3), time_us), 5, 0)
    is_start = collective == "startup"
    types = ("none", "none") if is_start else ("float32", "sum")
    where = (library, "private", collective, 2, size, size // 4, *types, -1)
    return Row(*where, side, None if is_start else side)


def keep(folder: Path, name: str, *rows: Row) -> None:
    environment = {
        "cpu": "a CPU", "date": name[:10], "usable_cpus": 2, "libraries": {}, "array": "numpy",
        "ranks": 2, "command": "", "kernel": "", "python": "",
    }  # fmt: skip
    Results(environment, list(rows)).write(folder / name)


def test_the_newest_results_are_taken(kept):
    for date, time_us in (("2030-01-03", 3.0), ("2030-01-02", 2.0)):
        found = row("all_reduce", "gpucoll", 4, time_us), row("all_reduce", "impi", 4, 6.0)
        keep(kept, f"{date}-all-2-ranks.json", *found)
    keep(kept, "2030-01-01-startup-2-ranks.json", row("startup", "gpucoll", 0, 2.0),
         row("startup", "mpich", 0, 1.0))  # fmt: skip
    drawn = {one.path.stem: one for one in draw_pictures.drawings()}
    assert sorted(drawn) == [
        f"{name}-{theme}"
        for name in ("calls", "headline", "ratios_in_place", "ratios_out_of_place")
        for theme in ("dark", "light")
    ]
    bars, theme, origin = drawn["headline-dark"].arguments
    assert [(bar.label, bar.ratio.value, bar.peer) for bar in bars] == [
        ("all_reduce of 4 B", 0.5, "Intel MPI"),
        ("program that adds up its ranks, with its launcher", 2.0, "MPICH"),
    ]
    assert (theme, origin) == ("dark", "a CPU, 2030-01-03")


def test_names_choose_pictures(kept, monkeypatch, capsys):
    keep(kept, "2030-01-02-all_reduce-2-ranks.json", row("all_reduce", "gpucoll", 4, 1.0))
    drawn = []
    monkeypatch.setattr(draw_pictures, "lines", lambda *given: given[4])
    monkeypatch.setattr(draw_pictures, "save", lambda one, path: drawn.append((one, path)))
    assert draw_pictures.main(["all_reduce-d", "calls"]) == 0
    assert drawn == [("dark", kept.parent / "docs/all_reduce-dark.svg")]
    assert capsys.readouterr().out == "docs/all_reduce-dark.svg\n"
    with pytest.raises(SystemExit) as ended:
        draw_pictures.main(["nothing"])
    assert ended.value.code == 2
    assert "no picture's name begins with nothing" in capsys.readouterr().err
