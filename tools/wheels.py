"""Build the source distribution and the wheels, and check what they hold.

::

    python tools/wheels.py dist                        # as a release has them
    python tools/wheels.py dist --levels "" --without 3.12   # quicker, as .ci/run does

The source distribution comes from this checkout, and every wheel from the source distribution: one
with machine code for each Python that the README names, and one without machine code
(``py3-none-any``) for other Pythons and processors (docs/decisions/0104). Each is built in an
isolated environment. The tools of the build (build, twine, auditwheel, wheel) are installed into
``build/release_tools`` first.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import link_tree
import pythons

ROOT = link_tree.ROOT
TOOLS = ROOT / "build" / "release_tools"
GLIBC = "2_28"
"""The oldest glibc that wheels ask for; tests/test_packaging.py checks what the loops call."""
LIMIT_S = 1200.0
IN_NO_SDIST = re.compile(
    r"\.git(ignore$|hub/)|(build|dist|\.\w+_cache)/|.*(__pycache__/|\.egg-info/)"
)
"""What a checkout has and a source distribution has not."""
MADE_BY_SETUPTOOLS = re.compile(r"PKG-INFO|setup\.cfg|gpucoll\.egg-info/.*")
SHIPPED = (".py", ".typed", ".cu", ".h")
PLACES_OF_BUILDS = re.compile(rb"/(?:tmp|home|root|build)/[\w.-]+/")


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """Run a command; return its output, and end this program with all of it if it fails."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("GPUCOLL_")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**kept, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n{' '.join(map(str, command))}: code {done.returncode}")
    return done.stdout


def install_tools(folder: Path = TOOLS) -> Path:
    """Return a Python that has the tools of the build, installed once into a folder."""
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        run(sys.executable, "-m", "venv", "--clear", folder)
        run(python, "-m", "pip", "install", "-q", "build", "twine", "auditwheel", "wheel")
        (folder / "installed").touch()
    return python


def build(
    tree: Path,
    dist: Path,
    interpreters: Mapping[str, Path],
    levels: str = "all",
    made: Path | None = None,
) -> list[Path]:
    """Build and check everything; return the files in `dist`.

    Parameters
    ----------
    tree : Path
        A checkout. The build leaves its own folders in it.
    dist : Path
        An empty or a new folder.
    interpreters : mapping of str to Path
        The Pythons to make machine code for, by version.
    levels : str
        ``GPUCOLL_BUILD_FOR`` of the wheels with machine code.
    made : Path, optional
        The folder ``build`` of an earlier build of the same sources, whose machine code is used.

    Raises
    ------
    SystemExit
        A build fails, or a file holds what it should not, or lacks something.
    """
    tools = install_tools()
    wanted = {name for name in files_below(tree) if not IN_NO_SDIST.match(name)}
    run(tools, "-m", "build", "-q", "--sdist", "--outdir", dist, tree, PIP_NO_COMPILE="1")
    (archive,) = dist.glob("*.tar.gz")
    check(archive, names_in(archive), wanted)
    with tempfile.TemporaryDirectory(prefix="gpucoll-wheels-") as work:
        sources = unpacked(archive, Path(work))
        if made is not None:
            shutil.copytree(made, sources / "build")
        fresh = Path(work) / "wheels"
        for version, python in interpreters.items():
            print(f"wheel for Python {version}", flush=True)
            wheel = build_wheel(tools, python, sources, fresh / version, levels)
            run(tools, "-m", "auditwheel", "show", wheel)
            tag = f"manylinux_{GLIBC}_{platform.machine()}"
            run(tools, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, wheel)
        print("wheel without machine code", flush=True)
        build_wheel(tools, Path(sys.executable), sources, fresh / "pure", "none")
        for wheel in fresh.rglob("*.whl"):
            check_wheel(wheel, sources)
            shutil.copy(wheel, dist)
    files = sorted(dist.iterdir())
    run(tools, "-m", "twine", "check", "--strict", *files)
    return files


def build_wheel(tools: Path, python: Path, sources: Path, folder: Path, levels: str) -> Path:
    """Build one wheel for an interpreter in an isolated environment; return it."""
    pip = (tools, "-m", "pip", "--python", python)
    arguments = ("wheel", "-q", "--no-deps", "-w", folder, sources)
    run(*pip, *arguments, GPUCOLL_BUILD_FOR=levels)
    (wheel,) = folder.glob("*.whl")
    return wheel


def files_below(tree: Path) -> set[str]:
    """Return the names of a checkout's files: those that git tracks, or all without git."""
    if (tree / ".git").exists():
        return {*run("git", "ls-files", cwd=tree).splitlines()}
    return {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}


def unpacked(archive: Path, folder: Path) -> Path:
    """Unpack a source distribution; return its one folder."""
    with tarfile.open(archive) as packed:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.2, which Debian 12 has, has none
            packed.extraction_filter = tarfile.data_filter
        packed.extractall(folder)
    (sources,) = folder.iterdir()
    return sources


def names_in(archive: Path) -> set[str]:
    """Return the names of a source distribution's files, without those that setuptools makes."""
    with tarfile.open(archive) as packed:
        names = (member.name.partition("/")[2] for member in packed if member.isfile())
        return {name for name in names if not MADE_BY_SETUPTOOLS.fullmatch(name)}


def package_files(tree: Path) -> set[str]:
    """Return the names that an installation has of a checkout's files."""
    roots = {name: folder.relative_to(ROOT) for name, folder in link_tree.package_roots().items()}
    return {
        f"{package.replace('.', '/')}/{path.relative_to(tree / folder).as_posix()}"
        for package, folder in roots.items()
        for path in (tree / folder).rglob("*")
        if path.suffix in SHIPPED
    }


def check_wheel(wheel: Path, sources: Path) -> None:
    """Check that a wheel has the package, its machine code, its licence and nothing else."""
    with zipfile.ZipFile(wheel) as packed:
        names = {*packed.namelist()}
        code = {name for name in names if name.startswith("gpucoll/machine_code/")}
        about = {name for name in names if ".dist-info/" in name}
        check(wheel, names - code - about, package_files(sources))
        if not any(name.endswith("/LICENSE") for name in about):
            raise SystemExit(f"{wheel.name} has no licence")
        is_pure = wheel.name.endswith("-none-any.whl")
        if is_pure == any(name.endswith(".so") for name in code):
            raise SystemExit(f"{wheel.name}: its machine code is {sorted(code)}")
        for name in code:
            if found := PLACES_OF_BUILDS.search(packed.read(name)):
                raise SystemExit(f"{wheel.name}: {name} names {found[0]!r}, a place of this build")


def check(archive: Path, names: Iterable[str], wanted: Iterable[str]) -> None:
    """End this program if an archive's names are not those that it should have."""
    names, wanted = {*names}, {*wanted}
    if names != wanted:
        raise SystemExit(
            f"{archive.name} has {sorted(names - wanted)} too many and lacks "
            f"{sorted(wanted - names)} (setup.py, MANIFEST.in)"
        )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Build the sdist and the wheels, and check them.")
    parser.add_argument("dist", type=Path, help="the folder for them; must not exist")
    parser.add_argument("--levels", default="all", help='GPUCOLL_BUILD_FOR; "": this processor')
    parser.add_argument("--without", nargs="+", default=[], metavar="VERSION")
    parser.add_argument("--made", type=Path, help="build folder of an earlier build")
    options = parser.parse_args(arguments)
    if options.dist.exists():
        parser.error(f"{options.dist} exists")
    found = {version: pythons.find(version) for version in pythons.promised()}
    chosen = {version: path for version, path in found.items() if version not in options.without}
    interpreters = {version: path for version, path in chosen.items() if path is not None}
    for version in chosen.keys() - interpreters.keys():
        print(f"no wheel for Python {version}: this machine has none")
    for path in build(ROOT, options.dist, interpreters, options.levels, options.made):
        print(f"{path.name}  {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
