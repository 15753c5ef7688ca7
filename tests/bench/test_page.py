"""The page of kept results: what its sections say, without pictures."""

from __future__ import annotations

import base64
import json
import re
import sys

import pytest
from tests.bench.kept_results import content, write

from gpucoll.bench import cli, page, report
from gpucoll.bench.pictures import calls_of
from gpucoll.bench.results import SIDES


def cells(made):
    (call,) = calls_of(made).values()
    return [cell for side in SIDES for cell in page.cells_of(call, call.name, side)]


def slow_in_place(library, side, size):
    """Let gpucoll take 3 times as long as the best peer at 1 KiB in place."""
    return 6.0 if (library, side, size) == ("gpucoll", "in_place", 1024) else 1.0


def test_where_a_peer_is_faster_comes_with_its_name():
    made = content(factor=slow_in_place, noise=0.001)
    text = "\n".join(page.peers_section(cells(made)))

    assert text.index("Where a peer is faster") < text.index("Where gpucoll is faster")
    assert "At 1 of 26 calls, sizes and sides" in text
    assert "At 25 of 26. At none the interval contains 1. The median of all ratios is 0.50" in text
    (row,) = re.findall(r"<tr><td.*", text)
    assert re.sub(r"<[^>]+>", "|", row).replace("||", "|").split("|")[1:5] == [
        "all_reduce", "in place", "1 KiB", "6.10"
    ]  # fmt: skip
    assert "Intel MPI" in row


@pytest.mark.parametrize(("rounds", "said"), [(2, ["number of rounds is 2"]), (5, [])])
def test_intervals_of_few_rounds_come_with_a_caution(rounds, said):
    made = content(sizes=(4,), rounds=rounds)
    for lines in (page.notes([made]), report.markdown([made])):
        text = "\n".join(lines)
        assert re.findall(r"number of rounds is \d", text) == said


def test_a_cell_has_its_interval_and_the_peer():
    made = content(factor=slow_in_place, noise=0.001, sizes=(1024,))
    out_of_place, in_place = (page.heat_cell(cell) for cell in cells(made))

    assert 'class="peer"' in in_place
    assert re.search(r'ratio 3\.0\d \[[23]\.\d\d, 3\.\d\d\]">3\.0\d<span class="hidden">', in_place)
    assert "Intel MPI" in in_place
    assert "peer" not in out_of_place
    even = content(factor=lambda name, *_: 2.0 if name == "gpucoll" else 1.0, noise=0, sizes=(4,))
    assert "background:#ffffff" in page.heat_cell(cells(even)[0])


def test_the_bars_are_of_a_small_a_middle_and_a_large_size():
    chosen = page.headline_cells(cells(content()))
    assert [cell.size_bytes for cell in chosen] == [4, 65536, 64 << 20]
    assert [cell.size_bytes for cell in page.headline_cells(cells(content(sizes=(64,))))] == [64]
    assert page.headline_cells([]) == []


def test_files_to_download_have_no_paths():
    made = content(sizes=(4,))
    text = "\n".join(page.method_section([made]))

    assert "/home/me" not in text
    (data,) = re.findall(r'href="data:application/json;base64,([^"]+)"', text)
    kept = json.loads(base64.b64decode(data))
    assert kept["results"] == made["results"]
    assert kept["environment"]["command"] == (
        "gpucoll-bench all_reduce --compare mpich=PYTHON,impi --json FILE"
    )
    assert made["environment"]["command"].count("/home/me") == 1  # the results are not changed


def test_without_peers_nothing_is_compared():
    made = content(sizes=(4,))
    made["results"] = made["results"][:1]
    assert "No other library was measured" in "\n".join(page.peers_section(cells(made)))
    assert list(page.heat_section(cells(made))) == []


def test_colours_of_pictures_follow_the_reader():
    drawn = page.themed('<path style="fill: #0072b2; stroke: #123456"/>')
    assert drawn == '<path style="fill: var(--c0072b2); stroke: #123456"/>'
    assert "--c0072b2: #0072b2;" in page.colours()
    assert "--c0072b2: #56b4e9;" in page.colours().partition("dark")[2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--html", "it.html"], "it.html: the pictures of a page need matplotlib: pip install"),
        (["--plot", "it.svg"], "it.svg: a picture needs matplotlib: pip install 'gpucoll[plot]'"),
        (["--plot", "it.gif"], "it.gif: the name must end with .svg, .png or .pdf"),
    ],
)
def test_a_report_without_matplotlib(tmp_path, monkeypatch, capsys, options, said):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.chdir(tmp_path)
    kept = write(tmp_path, "a.json", content(sizes=(4,)))
    assert cli.main(["report", kept, *options]) == 2
    assert capsys.readouterr().err.startswith(f"gpucoll-bench report: {said}")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_run_that_could_not_write_its_page_is_not_started(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cli, "compile_kernels", lambda: pytest.fail("the run was started"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["--ranks", "2", "-e", "4", "--html", "it.html"]) == 2
    assert "pip install 'gpucoll[plot]'" in capsys.readouterr().err
    monkeypatch.setattr("gpucoll.bench.page.why_not", lambda path: None)
    assert cli.main(["--ranks", "2", "-e", "4", "--html", str(tmp_path / "no" / "it.html")]) == 2
    assert "cannot write a file there" in capsys.readouterr().err
