"""The whole page, with its pictures, as a parser and as Chromium without a network see it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from subprocess import DEVNULL

import pytest
from tests.bench.kept_results import content, write

from gpucoll.bench import cli
from gpucoll.bench.page_assets import SCRIPT

pytest.importorskip("matplotlib", reason="matplotlib, which draws the page's pictures")

EMPTY = {"meta", "br", "input", "link", "img"}
AFTER_CLICKS = """<script>
document.querySelector("#peers ~ .wide th:nth-child(3) button").click();
document.querySelector("#sides input[value=in_place]").click();
const first = document.querySelector("[data-side=in_place] td[data-tip]");
const press = (cell, key) =>
  cell.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
first.focus();
press(first, "ArrowRight");
press(document.activeElement, "ArrowDown");
const cell = document.activeElement;
cell.dispatchEvent(new MouseEvent("mouseenter"));
console.error("this is seen");
</script></body>"""


class Page(HTMLParser):
    """Collects elements, and fails if they are not nested."""

    def __init__(self):
        super().__init__()
        self.ids, self.links, self.open, self.text = [], [], [], []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [
            value
            for name, value in attributes
            if name in ("src", "href", "xlink:href", "action", "srcset")
        ]
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in EMPTY:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def slow_at_64_ki(library, side, size):
    return 5.0 if library == "gpucoll" and size >= 65536 else 1.0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the path of a page with two calls and a name that HTML must escape."""
    folder = tmp_path_factory.mktemp("page")
    result = content(factor=slow_at_64_ki, sizes=(4, 1024, 65536, 1 << 20))
    other = content(3, sizes=(4, 1024))
    for entry in other["results"]:
        entry["collective"] = "broadcast"
    result["results"] += other["results"]
    result["environment"]["cpu"] = "A <b>CPU</b> & </script>"
    path = folder / "page.html"
    assert cli.main(["report", write(folder, "a.json", result), "--html", str(path)]) == 0
    return path


def test_the_page_is_whole_and_needs_nothing_else(made):
    text = made.read_text(encoding="utf-8")
    parsed = Page()
    parsed.feed(text)
    parsed.close()

    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids))
    assert {"headline-title", "calls-0-title", "peers", "ratios", "times"} <= {*parsed.ids}
    assert all(link.startswith(("#", "data:application/json;base64,")) for link in parsed.links)
    references = {link[1:] for link in parsed.links if link.startswith("#")}
    assert references | {*re.findall(r"url\(#([^)]+)\)", text)} <= {*parsed.ids}
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org/)", text)
    assert any("A <b>CPU</b> & </script>" in data for data in parsed.text)
    assert text.count("<script>") == 1
    assert SCRIPT.count("\n") <= 100


def without_network():
    """Return the beginning of a command that has no network; None if that cannot be done."""
    for command in (["unshare", "-n"], ["unshare", "-rn"]):
        if shutil.which("unshare") and subprocess.call([*command, "true"], stderr=DEVNULL) == 0:
            return command
    return None


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Return a function that opens a page and returns its elements and the browser's log."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("chromium is not installed")
    if (cut_off := without_network()) is None:
        pytest.skip("no network namespace can be made")

    def opened(path: Path):
        profile = tmp_path_factory.mktemp("profile")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
        options += [f"--user-data-dir={profile}", "--virtual-time-budget=5000", "--dump-dom"]
        ended = subprocess.run(
            [*cut_off, program, *options, path.as_uri()],
            capture_output=True, text=True, timeout=120, check=True,
            env={**os.environ, "HOME": str(profile)},
        )  # fmt: skip
        return ended.stdout, re.findall(
            r'CONSOLE[^"]*"(.*)", source: file:', ended.stderr
        )  # Chromium's own pages have messages, too

    return opened


def test_chromium_opens_it_without_a_network(made, browser, tmp_path):
    elements, messages = browser(made)
    assert messages == []
    assert '<fieldset id="sides">' in elements
    assert '<button type="button">ratio</button>' in elements

    clicked = tmp_path / "clicked.html"
    clicked.write_text(made.read_text("utf-8").replace("</body>", AFTER_CLICKS), "utf-8")
    elements, messages = browser(clicked)
    assert messages == ["this is seen"]
    assert re.search(r'aria-sort="ascending"><button type="button">size<', elements)
    first = elements[elements.index('id="peers"') :]
    table = first[: first.index("</table>")]
    sizes = re.findall(r'<td data-value="[\d.e+]+">([\d.]+ \w+)</td>', table)
    assert sizes == ["64 KiB", "64 KiB", "1 MiB", "1 MiB"]
    assert 'data-side="out_of_place" hidden=""' in elements
    assert re.search(r'<div id="tip" style="[^"]+">broadcast, 1 KiB, in place: gpucoll', elements)


def test_a_picture_of_kept_results(made, tmp_path):
    kept = str(made.with_name("a.json"))
    for name in ("all.svg", "all.png"):
        assert cli.main(["report", kept, kept, "--plot", str(tmp_path / name)]) == 0
        assert (tmp_path / name).stat().st_size > 5000


def test_chromium_without_scripts(made, browser, tmp_path):
    """Everything is there: only sorting, selecting and quick titles need the script."""
    plain = tmp_path / "plain.html"
    plain.write_text(re.sub(r"<script>.*</script>", "", made.read_text("utf-8"), flags=re.DOTALL))
    elements, messages = browser(plain)
    assert messages == []
    assert 'id="sides" hidden=""' in elements
    assert elements.count('title="all_reduce') == 8
