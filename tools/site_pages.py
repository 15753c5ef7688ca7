"""The sources of the site: the checkout's documents as Sphinx reads them, and pages made of code.

`pages` returns all of them as text. Documents keep their paths, so their links to each other stay
as they are. A link to a file that is not a document leads to a page with its text, or, if it is
large, to a copy. The README is the landing page, and docs/README.md decides the navigation.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import site_reference
from link_tree import ROOT

DOCUMENTS = ("*.md", "docs/**/*.md", "tests/README.md", "bench/**/*.md", "examples/**/*.md")
README, INDEX, LANDING = "README.md", "docs/README.md", "index.md"
DECISIONS, MODELS = "docs/decisions/README.md", "docs/models/README.md"

CAPTIONS = {
    "I am new here": "Start",
    "I come from another library": "I use ...",
    "I test, or change gpucoll": "Development",
}
"""Headings of the index whose sections have a shorter name in the navigation."""
API, RECORDS = "API", "Why it is so"
"""Sections of the navigation that the index does not have."""

LINK = re.compile(
    r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)"
)
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"<picture>.*?</picture>", re.DOTALL)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash"}
MOST_SHOWN_BYTES = 200_000
"""A larger file is offered as a copy instead of a page."""


@dataclass
class Sources:
    """What the site is made of, by path."""

    texts: dict[str, str] = field(default_factory=dict)
    copies: set[str] = field(default_factory=set)
    """Files of the checkout that pages show or link to as they are."""


def pages() -> Sources:
    """Return the sources of all pages that come from the checkout."""
    sources = Sources()
    documents = {
        str(path.relative_to(ROOT)) for pattern in DOCUMENTS for path in ROOT.glob(pattern)
    }
    for name in sorted(documents):
        text = (ROOT / name).read_text(encoding="utf-8")
        sources.texts[LANDING if name == README else name] = adapted(name, text, documents, sources)
    sources.texts[LANDING] += navigation((ROOT / INDEX).read_text(encoding="utf-8"), documents)
    sources.texts[DECISIONS] += toctree("", sorted(beside(DECISIONS, documents)), is_shown=True)
    return sources


# --- links ----------------------------------------------------------------------------------------


def adapted(name: str, text: str, documents: set[str], sources: Sources) -> str:
    """Return a document whose links and pictures lead to pages and files of the site."""

    def link(match: re.Match[str]) -> str:
        mark, words, target, anchor = match.groups()
        found = place_of(normal(PurePosixPath(name).parent / target), documents, sources)
        return f"{mark}[{words}]({relative(found, name)}{anchor or ''})"

    def picture(match: re.Match[str]) -> str:
        dark, light, words = (
            re.findall(rf'{each}="([^"]*)"', match[0])[0] for each in (" srcset", " src", " alt")
        )
        return "\n\n".join(
            f'<img alt="{words}" src="{image}" class="only-{shade}">'
            for image, shade in ((light, "light"), (dark, "dark"))
        )

    parts = FENCED.split(text)
    for index in range(0, len(parts), 2):
        parts[index] = LINK.sub(link, PICTURE.sub(picture, parts[index]))
    for image in re.findall(r'<img [^>]*src="([^":]+)"', "".join(parts[::2])):
        place_of(normal(PurePosixPath(name).parent / image), documents, sources)
    return "".join(parts)


def place_of(path: str, documents: set[str], sources: Sources) -> str:
    """Return the page, or the copied file, that a link to a path of the checkout leads to."""
    if path == README:
        return LANDING
    if path in documents:
        return path
    file = ROOT / path
    if file.is_dir():
        return folder_page(path, documents, sources)
    if not file.is_file():
        raise SystemExit(f"site: a document links to {path}, which does not exist")
    sources.copies.add(path)
    if file.suffix in (".json", ".png", ".svg") or file.stat().st_size > MOST_SHOWN_BYTES:
        return path
    page = f"{path}.md"
    language = LANGUAGES.get(file.suffix, "none")
    sources.texts[page] = (
        f"---\norphan: true\nnosearch: true\n---\n\n# {path}\n\n"
        f"```{{literalinclude}} /{path}\n:language: {language}\n```\n"
    )
    return page


def folder_page(path: str, documents: set[str], sources: Sources) -> str:
    """Return the page of a folder: its README, or one that lists its files."""
    if f"{path}/README.md" in documents:
        return f"{path}/README.md"
    page = f"{path}/index.md"
    if page not in sources.texts:
        files = sorted(
            each.name for each in (ROOT / path).iterdir() if each.is_file() and each.name[0] != "."
        )
        found = {each: place_of(f"{path}/{each}", documents, sources) for each in files}
        rows = "".join(f"- [{each}]({relative(place, page)})\n" for each, place in found.items())
        sources.texts[page] = f"---\norphan: true\nnosearch: true\n---\n\n# {path}\n\n{rows}"
    return page


def normal(path: PurePosixPath) -> str:
    """Return a path without ``..``."""
    return os.path.normpath(path)


def relative(target: str, source: str) -> str:
    """Return the link from one page to another."""
    return os.path.relpath(target, PurePosixPath(source).parent)


# --- navigation -----------------------------------------------------------------------------------


def navigation(index: str, documents: set[str]) -> str:
    """Return the table of contents: the sections of the index, the API and the records.

    A document belongs to the first section that links to the whole of it.
    """
    placed = {INDEX, "docs/api.md", DECISIONS, MODELS, *beside(DECISIONS, documents), README}
    _, *sections = re.split(r"^## (.+)$", index, flags=re.MULTILINE)
    contents: dict[str, list[str]] = {}
    for heading, text in zip(sections[::2], sections[1::2], strict=True):
        names = contents[CAPTIONS.get(heading, heading)] = []
        for _, _, target, anchor in LINK.findall(text):
            name = normal(PurePosixPath(INDEX).parent / target)
            if not anchor and name in documents and name not in placed:
                placed.add(name)
                names.append(name)
    first, *others = contents
    contents[first].insert(0, INDEX)
    contents[others[-1]] += sorted(documents - placed)
    contents[API] = ["docs/api.md", *site_reference.in_navigation()]
    contents[RECORDS] = [DECISIONS, MODELS]
    order = (first, API, *others, RECORDS)
    return "".join(toctree(caption, contents[caption]) for caption in order)


def beside(index: str, documents: set[str]) -> set[str]:
    """Return the documents in the folder of one that is their index."""
    return {each for each in documents if Path(each).parent == Path(index).parent} - {index}


def toctree(caption: str, names: list[str], *, is_shown: bool = False) -> str:
    """Return a table of contents, as Markdown."""
    options = ":maxdepth: 1\n" if is_shown else f":hidden:\n:caption: {caption}\n"
    return f"\n```{{toctree}}\n{options}\n" + "".join(f"/{each}\n" for each in names) + "```\n"
