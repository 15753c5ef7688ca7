"""Build the site: the documents, and the reference made of docstrings, as HTML.

::

    python tools/make_site.py             # into build/site; open build/site/index.html
    python tools/make_site.py --check     # from nothing, into a folder that is removed again
    python tools/make_site.py --online    # types also link to Python's and NumPy's documentation

It needs ``pip install '.[docs]'``. Warnings are errors, and every link within the site must lead
somewhere. Neither building nor reading needs a network, except with ``--online``. Sphinx reads the
pages from a folder beside the site's, where tools/site_pages.py and tools/site_reference.py put
them.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
import urllib.request
from pathlib import Path

import link_tree
import site_links
import site_pages
import site_reference

ROOT = link_tree.ROOT
REACHED_S = 10.0
NEEDED = ("sphinx", "furo", "myst_parser", "numpydoc", "sphinx_copybutton", "cloudpickle", "numba")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Build the site.")
    parser.add_argument("place", nargs="?", type=Path, default=ROOT / "build/site")
    parser.add_argument("--check", action="store_true", help="build everything anew, keep nothing")
    parser.add_argument("--online", action="store_true", help="link to Python's and NumPy's names")
    options = parser.parse_args(arguments)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        needs = ", ".join(missing)
        print(f"site: {needs} cannot be imported: pip install '.[docs]'", file=sys.stderr)
        return 2
    is_online = options.online and are_reached()
    if not options.check:
        return build(options.place.resolve(), is_online=is_online)
    with tempfile.TemporaryDirectory() as folder:
        return build(Path(folder, "site"), is_online=is_online)


def are_reached() -> bool:
    """Return whether the lists of names of other sites can be read; say so if not."""
    for url in site_reference.ELSEWHERE.values():
        try:
            urllib.request.urlopen(f"{url}/objects.inv", timeout=REACHED_S).close()
        except OSError as error:
            print(f"site: no links to names of others: {url}: {error}", file=sys.stderr)
            return False
    return True


def build(place: Path, *, is_online: bool = False) -> int:
    """Write the sources, let Sphinx make pages of them, check these; return the exit code."""
    link_tree.make()
    sys.path.insert(0, str(link_tree.DEFAULT_PLACE))
    from sphinx.cmd.build import main as run_sphinx

    sources = site_pages.pages()
    sources.texts.update(site_reference.pages())
    source, trees = place.with_name(f"{place.name}_source"), place.with_name(f"{place.name}_trees")
    refuse_others(source, trees)
    write(sources, source, place)
    options = ["-q", "-W", "--keep-going", "-n", "-b", "html", "-c", str(ROOT / "docs")]
    options += ["-d", str(trees), *(["-t", "online"] if is_online else [])]
    code: int = run_sphinx([*options, str(source), str(place)])
    problems = site_links.problems(place)
    for problem in problems:
        print(f"site: {problem}", file=sys.stderr)
    if code:  # Sphinx would not read these pages again, nor repeat what it said of them
        shutil.rmtree(trees, ignore_errors=True)
    if code or problems:
        return 1
    print(f"site: {place / 'index.html'}")
    return 0


def refuse_others(source: Path, trees: Path) -> None:
    """End this program if a folder that it would empty is somebody else's."""
    if (source / site_pages.LANDING).is_file():
        return
    for folder in (source, trees):
        if folder.is_dir() and any(folder.iterdir()):
            raise SystemExit(f"site: {folder} was not made by this tool: name another place")


def write(sources: site_pages.Sources, folder: Path, place: Path) -> None:
    """Bring the folder of sources up to date; what has not changed is not written again.

    The page of a source that is gone is removed from the site, which Sphinx does not do.
    """
    wanted = {name: text.encode() for name, text in sources.texts.items()}
    wanted.update((name, (ROOT / name).read_bytes()) for name in sources.copies)
    for path in [*folder.rglob("*")]:
        source = path.relative_to(folder)
        if path.is_file() and str(source) not in wanted:
            path.unlink()
            if source.suffix == ".md":
                (place / source).with_suffix(".html").unlink(missing_ok=True)
    for name in sorted(wanted, key=lambda each: each != site_pages.LANDING):
        content, path = wanted[name], folder / name
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
