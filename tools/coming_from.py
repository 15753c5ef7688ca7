"""Write what is made of the table of other libraries' names: the tables of docs/coming_from.

::

    python tools/coming_from.py            # writes what has changed
    python tools/coming_from.py --check    # exit code 1 if something has

The table is ``src/gpucoll/api/coming_from.py``. Each page has a pair of markers for each library,
between which this tool writes. It also writes the names that gpucoll's communicator answers for
into ``src/gpucoll/api/names_elsewhere.py``, which does not read the table when it is imported.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from itertools import groupby
from pathlib import Path

from gpucoll.api.coming_from import Row, rows
from gpucoll.api.names_elsewhere import MEMBERS

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs/coming_from"
NAMES = ROOT / "src/gpucoll/api/names_elsewhere.py"
TESTED = {"equal": "equal", "runs": "both run", "named": "here alone"}
_BEGIN, _END = "<!-- rows of {}, by tools/coming_from.py -->", "<!-- end of rows -->"
_NAMES_BEGIN = "# Written by tools/coming_from.py, here and to the next line like it.\n"
_NAMES_END = "# The end of what tools/coming_from.py writes.\n"


def main() -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(description="Write the tables of docs/coming_from.")
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    check: bool = parser.parse_args().check
    changed = [path for path, text in written().items() if path.read_text("utf-8") != text]
    for path in changed:
        print(f"{path.relative_to(ROOT)} {'differs from the table' if check else 'written'}")
        if not check:
            path.write_text(written()[path], "utf-8")
    return 1 if check and changed else 0


def written() -> dict[Path, str]:
    """Return what each file should hold, by its path."""
    texts = {path: page(path.read_text("utf-8")) for path in sorted(PAGES.glob("*.md"))}
    return texts | {NAMES: between(NAMES.read_text("utf-8"), _NAMES_BEGIN, names(), _NAMES_END)}


def page(text: str) -> str:
    """Return a page with the tables of the libraries that it has markers for."""
    for library in dict.fromkeys(row.library for row in rows()):
        begin = _BEGIN.format(library)
        if begin in text:
            text = between(text, f"{begin}\n", table(library), _END)
    return text


def between(text: str, begin: str, what: str, end: str) -> str:
    """Return a text in which `what` stands between two markers."""
    before, rest = text.split(begin)
    return before + begin + what + end + rest.split(end, 1)[1]


def table(library: str) -> str:
    """Return the tables of a library's sections, in Markdown."""
    lines = []
    of_library = [row for row in rows() if row.library == library]
    has_tested = any(row.tested == "equal" for row in of_library)
    for section, group in groupby(of_library, key=lambda row: row.section):
        head = ["There", "Here", "What differs"] + ["Tested"] * has_tested
        if is_without := section == "Not here":
            head = ["There", "What to do instead"]
        lines += ["", f"### {section}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for row in group:
            cells = [code(row.there), code(row.here), linked(row.differs), TESTED[row.tested]]
            cells = cells[:3:2] if is_without else cells[: len(head)]
            lines.append("".join(f"| {cell} " if cell else "| " for cell in cells) + "|")
    return "\n".join([*lines, "", ""])


def code(text: str) -> str:
    """Return code as it stands in a cell."""
    return f"`{text}`" if text else ""


def linked(text: str) -> str:
    """Return a clause whose examples are links."""
    return re.sub(r"(examples/(\w+\.py))", r"[`\2`](../../\1)", text)


def names() -> str:
    """Return the names that a communicator answers for, as Python."""
    answered = sorted({name for row in rows() if on_communicators(row) for name in row.names})
    words = " ".join(f'"{name}",' for name in answered if name not in MEMBERS)
    return f"NAMES = (\n{textwrap.indent(textwrap.fill(words, 95), '    ')}\n)  # fmt: skip\n"


def on_communicators(row: Row) -> bool:
    """Return whether people may look for the names of a row on a communicator."""
    return row.there.startswith("comm.") or "comm." in row.here


if __name__ == "__main__":
    sys.exit(main())
