"""Release a version: check the checkout, build and check the packages, tag them.

::

    python tools/release.py 0.1.0 --dry-run   # builds and checks, and changes nothing
    python tools/release.py 0.1.0             # leaves dist/0.1.0, two commits and the tag v0.1.0
    python tools/release.py 0.1.0 --upload    # uploads the packages, too

The two commits set the version of the release and the next one. They and the packages are made in a
worktree of their own, and arrive in the checkout together after all checks have passed.
docs/releasing.md describes what a person does before and after.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pythons
import wheels

ROOT = wheels.ROOT
UNRELEASED = "not released"
HEADING = re.compile(r"^## (\S+) \(([^)]+)\)$", re.MULTILINE)
PLACES = (
    ("src/gpucoll/version.py", '__version__: Final = "{}"'),
    ("packages/gpucoll-horovod/pyproject.toml", 'version = "{}"'),
    ("CITATION.cff", "version: {}"),
    ("packages/conda/recipe.yaml", 'version: "{}"'),
)
"""The files that contain the version, each with the line that does."""


def git(*arguments: str, at: Path = ROOT) -> str:
    """Run git in a checkout; return its output."""
    return wheels.run("git", *arguments, cwd=at).strip()


def version_of(tree: Path) -> str:
    """Return the version of a checkout."""
    name, line = PLACES[0]
    pattern = re.escape(line).replace(re.escape("{}"), "(.+)")
    found = re.search(f"^{pattern}$", (tree / name).read_text("utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit(f"{name} has no line {line.format('...')}")
    return found[1]


def set_version(tree: Path, version: str) -> None:
    """Write a version into every file that contains it."""
    before = version_of(tree)
    for name, line in PLACES:
        alone = rf"(?<![\w-]){re.escape(line.format(before))}(?!\S)"  # not cff-version
        text, n_found = re.subn(alone, line.format(version), (tree / name).read_text("utf-8"))
        if n_found != 1:
            raise SystemExit(f"{name}: {line.format(before)!r} does not stand there once")
        (tree / name).write_text(text, "utf-8")


def with_date(changelog: str, version: str, date: datetime.date) -> str:
    """Return the changelog in which the newest section, of this version, has a date."""
    newest = HEADING.search(changelog)
    if newest is None or newest[1] != version or newest[2] != UNRELEASED:
        found = "none" if newest is None else f"{newest[0]!r}"
        raise SystemExit(
            f"CHANGELOG.md: the newest section must be '## {version} ({UNRELEASED})'; it is {found}"
        )
    rest = changelog[newest.end() :]
    if "\n- " not in rest.partition("\n## ")[0]:
        raise SystemExit(f"CHANGELOG.md: the section of {version} names no change")
    return f"{changelog[: newest.start()]}## {version} ({date}){rest}"


def with_next(changelog: str, version: str) -> str:
    """Return the changelog with an empty section of the next version above the newest."""
    newest = HEADING.search(changelog)
    assert newest is not None
    begin = newest.start()
    return f"{changelog[:begin]}## {version} ({UNRELEASED})\n\n{changelog[begin:]}"


def next_version(version: str) -> str:
    """Return the minor version after this one."""
    major, minor, _ = version.split(".")
    return f"{major}.{int(minor) + 1}.0"


def check(version: str, without: list[str]) -> dict[str, Path]:
    """Check what must hold before anything is built; return the Pythons to build for."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise SystemExit(f"{version} is no version of three numbers, such as 0.1.0")
    if changed := git("status", "--porcelain"):
        raise SystemExit(f"the checkout has changes that are not committed:\n{changed}")
    if git("tag", "--list", f"v{version}"):
        raise SystemExit(f"the tag v{version} exists: {version} is released, or was tried")
    if (dist := ROOT / "dist" / version).exists():
        raise SystemExit(f"{dist} exists: remove it, or name another version")
    with_date((ROOT / "CHANGELOG.md").read_text("utf-8"), version, datetime.date.min)
    found = {name: pythons.find(name) for name in pythons.promised() if name not in without}
    if missing := [name for name, path in found.items() if path is None]:
        raise SystemExit(
            f"this machine has no Python {', '.join(missing)}: install it, or build no wheel "
            f"for it (--without {' '.join(missing)})"
        )
    return {name: path for name, path in found.items() if path is not None}


def commit(tree: Path, version: str, changelog: str, message: str) -> str:
    """Commit a version and a changelog; return the commit."""
    set_version(tree, version)
    (tree / "CHANGELOG.md").write_text(changelog, "utf-8")
    git("commit", "--quiet", "--all", "--message", message, at=tree)
    return git("rev-parse", "HEAD", at=tree)


def release(version: str, interpreters: dict[str, Path], work: Path) -> tuple[str, str]:
    """Commit, build and check in a worktree; return the commits of the release and after it."""
    tree = work / "tree"
    git("worktree", "add", "--quiet", "--detach", str(tree))
    try:
        changelog = with_date(
            (tree / "CHANGELOG.md").read_text("utf-8"), version, datetime.date.today()
        )
        released = commit(tree, version, changelog, f"Release {version}")
        for file in wheels.build(tree, work / "dist", interpreters):
            print(f"{file.name}  {file.stat().st_size:,} bytes")
        then = next_version(version)
        after = commit(tree, f"{then}.dev0", with_next(changelog, then), f"Begin {then}")
    finally:
        git("worktree", "remove", "--force", str(tree))
    return released, after


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Build, check and tag a release.")
    parser.add_argument("version", help="three numbers, such as 0.1.0")
    parser.add_argument("--dry-run", action="store_true", help="build and check, change nothing")
    parser.add_argument("--upload", action="store_true", help="upload the packages with twine")
    parser.add_argument("--without", nargs="+", default=[], metavar="PYTHON")
    options = parser.parse_args(arguments)
    version = options.version
    interpreters = check(version, options.without)
    with tempfile.TemporaryDirectory(prefix="gpucoll-release-") as folder:
        released, after = release(version, interpreters, Path(folder))
        if options.dry_run:
            print(f"{version} can be released; nothing was changed")
            return 0
        git("merge", "--quiet", "--ff-only", after)  # fails if somebody has committed meanwhile
        dist = ROOT / "dist" / version
        shutil.copytree(Path(folder) / "dist", dist)
    git("tag", "--annotate", f"v{version}", "--message", f"gpucoll {version}", released)
    files = sorted(str(path.relative_to(ROOT)) for path in dist.iterdir())
    twine = [str(wheels.TOOLS / "bin" / "python"), "-m", "twine", "upload", *files]
    if options.upload and subprocess.run(twine, cwd=ROOT).returncode:
        print(f"the upload failed; the packages are in {dist}")
        return 1
    print(f"{version} is tagged. Next:\n  git push origin HEAD v{version}")
    if not options.upload:
        print(f"  {' '.join(twine)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
