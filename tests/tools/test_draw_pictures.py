"""The pictures of the documents show the newest results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import draw_pictures
import pytest

from gpucoll.bench.pictures import save

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
    monkeypatch.setattr(draw_pictures, "RESULTS", results)
    monkeypatch.setattr(draw_pictures, "IMAGES", docs)
    monkeypatch.setattr(draw_pictures, "ROOT", tmp_path)
    monkeypatch.setattr(draw_pictures, "OTHERS", {})
    results.mkdir()
    docs.mkdir()
    return results


def entry(collective: str, library: str, size: int, time_us: float) -> dict[str, object]:
    side = {"time": time_us, "bus_bw": None, "samples_us": [[time_us] * 3] * 2}
    return {
        "library": library, "placement": "private", "collective": collective, "ranks": 2,
        "type": "none" if collective == "startup" else "float32",
        "redop": "none" if collective == "startup" else "sum",
        "size": size, "in_place": None if collective == "startup" else side, "out_of_place": side,
    }  # fmt: skip


def keep(folder: Path, name: str, *entries: dict[str, object]) -> None:
    environment = {"cpu": "a CPU", "date": "2030-01-02", "usable_cpus": 2, "libraries": {}}
    content = {"results": list(entries), "limit": [], "environment": environment}
    (folder / name).write_text(json.dumps(content))


def test_the_newest_results_are_taken(kept):
    for date, time_us in (("2030-01-03", 3.0), ("2030-01-02", 2.0)):
        found = entry("all_reduce", "gpucoll", 4, time_us), entry("all_reduce", "impi", 4, 6.0)
        keep(kept, f"{date}-all-2-ranks.json", *found)
    keep(kept, "2030-01-01-startup-2-ranks.json", entry("startup", "gpucoll", 0, 2.0),
         entry("startup", "mpich", 0, 1.0))  # fmt: skip
    drawn = {one.path.stem: one for one in draw_pictures.drawings()}
    assert sorted(drawn) == [
        f"{name}-{theme}"
        for name in ("calls", "headline", "ratios_in_place", "ratios_out_of_place")
        for theme in ("dark", "light")
    ]
    bars, theme, origin = drawn["headline-dark"].arguments
    assert [(bar.label, bar.ratio.value, bar.peer) for bar in bars] == [
        ("all_reduce, 4 B", 0.5, "Intel MPI"),
        ("start of a program", 2.0, "MPICH"),
    ]
    assert (theme, origin) == ("dark", "a CPU, 2030-01-02")


def test_names_choose_pictures(kept, monkeypatch, capsys):
    keep(kept, "2030-01-02-all_reduce-2-ranks.json", entry("all_reduce", "gpucoll", 4, 1.0))
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
