"""What is wrong with the links of a built site: dead ends, and what needs a network to be read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Reader(HTMLParser):
    """Collects what a page links to, what it loads, and the anchors that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.anchors: set[str] = {""}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the attributes of an element."""
        values = dict(attrs)
        self.anchors.update(filter(None, (values.get("id"), values.get("name"))))
        target = values.get("href") or values.get("src")
        if not target:
            return
        is_link = tag == "a" or values.get("rel") in ("canonical", "author", "copyright")
        (self.links if is_link else self.loaded).add(target)


def problems(site: Path) -> list[str]:
    """Return one line for each dead link, and for each file that a page loads from elsewhere."""
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = reader = Reader()
        reader.feed(path.read_text(encoding="utf-8"))
    return [
        f"{path.relative_to(site)}: {problem}"
        for path, reader in pages.items()
        for problem in _of_page(path, reader, pages)
    ]


def _of_page(path: Path, reader: Reader, pages: dict[Path, Reader]) -> Iterator[str]:
    for target in sorted(reader.loaded | reader.links):
        url = urlsplit(target)
        if url.scheme or url.netloc:
            if target in reader.loaded and url.scheme != "data":
                yield f"loads {target}, which needs a network"
            continue
        found = Path(os.path.normpath(path.parent / unquote(url.path))) if url.path else path
        if not found.is_file():
            yield f"{target} leads nowhere"
        elif found in pages and unquote(url.fragment) not in pages[found].anchors:
            yield f"{target} leads to no heading"
