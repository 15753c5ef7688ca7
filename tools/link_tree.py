"""Lay out the four top-level folders as the one package ``gpucoll``, with symbolic links.

::

    python tools/link_tree.py                # build/link_tree/gpucoll
    python tools/link_tree.py /some/folder   # /some/folder/gpucoll

mypy, import-linter and pytest then see the package as if it were installed: mypy through
``mypy_path``, the others through ``PYTHONPATH``. ``kernels/``, ``backends/`` and ``bench/`` are
linked as a whole, ``src/gpucoll`` entry by entry, because one link to all of it would require the
other three inside the source folder. So new files appear at once, except directly under
``src/gpucoll``. For those, run this again; it changes nothing else and removes stale links.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_PLACE = ROOT / "build" / "link_tree"
PACKAGE = "gpucoll"


def package_roots() -> dict[str, Path]:
    """Return package name -> folder, read from ``setup.py`` as text (no setuptools needed)."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PACKAGE_ROOTS":
            return {name: ROOT / folder for name, folder in ast.literal_eval(node.value).items()}
    raise SystemExit("link_tree: setup.py has no PACKAGE_ROOTS = {...}")


def wanted_links() -> dict[str, Path]:
    """Return the contents of the package folder: entry name -> target of its link."""
    links: dict[str, Path] = {}
    for package, folder in package_roots().items():
        if package != PACKAGE:
            links[package.removeprefix(f"{PACKAGE}.")] = folder
            continue
        for entry in folder.iterdir():
            if entry.name != "__pycache__" and not entry.name.startswith("."):
                links[entry.name] = entry
    return {name: target for name, target in links.items() if target.exists()}


def link_text(target: Path, folder: Path) -> str:
    """Return the text of a link: relative within the checkout, which can then be moved."""
    if folder.is_relative_to(ROOT):
        return os.path.relpath(target, folder)
    return str(target)


def make(place: Path = DEFAULT_PLACE) -> list[str]:
    """Bring the tree at `place` up to date and return one line for each change.

    Parameters
    ----------
    place : Path
        The folder to put on the path; the package is the folder ``gpucoll`` in it.

    Returns
    -------
    list of str
        What was linked or removed; empty if nothing had to be done.
    """
    folder = place.resolve() / PACKAGE
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {name: link_text(target, folder) for name, target in wanted_links().items()}
    changes = []
    for entry in sorted(folder.iterdir()):
        if not entry.is_symlink():
            if entry.name != "__pycache__":
                raise SystemExit(f"link_tree: {entry} is not a link; move it away, then run again")
        elif entry.name not in wanted:
            entry.unlink()
            changes.append(f"removed {entry.name}")
        elif os.readlink(entry) == wanted[entry.name]:
            del wanted[entry.name]
    for name, text in sorted(wanted.items()):
        replace_link(folder / name, text)
        changes.append(f"linked {name} -> {text}")
    return changes


def replace_link(link: Path, text: str) -> None:
    """Replace a link atomically, because another process may be importing through the tree."""
    new = link.with_name(f".{link.name}.{os.getpid()}")
    new.symlink_to(text)
    new.replace(link)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Lay the package out by symbolic links.")
    parser.add_argument(
        "place", nargs="?", type=Path, default=DEFAULT_PLACE, help="default: %(default)s"
    )
    place: Path = parser.parse_args(arguments).place
    for line in make(place):
        print(line)
    print(f"put on the path: {place.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
