"""Build gpucoll: four top-level folders become the one package ``gpucoll``.

Everything that can be said declaratively is in ``pyproject.toml``. What stands here cannot be:
which folder becomes which part of the package, the version, the licence, a clean build, and the
machine code that goes into it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent

# The map of the house: tools/link_tree.py reads it too, so that there is only this one.
PACKAGE_ROOTS = {
    "gpucoll": "src/gpucoll",
    "gpucoll.kernels": "kernels",
    "gpucoll.backends": "backends",
    "gpucoll.bench": "bench",
}

# Files that are not Python and belong in the package, by pattern, for every package.
PACKAGE_DATA = ["py.typed", "*.cu", "*.h"]


# The levels of processors to make machine code for (gpucoll.backends.machine_code reads it, too).
BUILD_FOR = os.environ.get("GPUCOLL_BUILD_FOR", "").strip()
MAKING_LIMIT_S = 900


def packages() -> list[str]:
    """Return every package, found below each root by itself: nothing walks into tests or docs."""
    found = []
    for package, folder in PACKAGE_ROOTS.items():
        if not (HERE / folder / "__init__.py").is_file():
            raise SystemExit(f"setup.py: {package} needs {folder}/__init__.py, which is missing")
        found.append(package)
        found.extend(f"{package}.{name}" for name in find_packages(str(HERE / folder)))
    return found


def version() -> str:
    """Return the version, read as text: importing gpucoll here would need its dependencies."""
    text = (HERE / "src/gpucoll/version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__\b[^=]*= "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise SystemExit("setup.py: src/gpucoll/version.py has no line __version__ = ...")
    return match.group(1)


def description() -> str:
    """Return the README as a package index shows it, where its links to files lead nowhere.

    They become plain text, and the picture is left out with its caption; the sources have no home
    yet that links could lead to.
    """
    text = (HERE / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"^<!--.*-->\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"<picture>.*?</sub>\n\n", "", text, flags=re.DOTALL)
    text = re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", text)
    return f"{text}\nThe documents, examples and tests that are named here come with the sources.\n"


class FreshBuild(build_py):
    """Start from an empty folder: setuptools would ship modules deleted since the last build."""

    def run(self) -> None:
        """Drop what an earlier build left, then build."""
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "gpucoll", ignore_errors=True)
        super().run()


class WithMachineCode(Distribution):
    """A package for one interpreter and one kind of processor, unless no machine code is wanted."""

    def has_ext_modules(self) -> bool:
        """Return whether the wheel depends on the platform, and `MachineCode` runs."""
        return BUILD_FOR != "none"


class MachineCode(build_ext):
    """Put compiled loops and kernels into the package (docs/decisions/0077).

    A package without them works: loops are then compiled at the first run. So a failure stops the
    build only if the builder has named levels of processors.
    """

    def run(self) -> None:
        """Let the package that `build_py` has just built compile itself."""
        super().run()
        if self.inplace or getattr(self, "editable_mode", False):
            return
        folder = Path(self.build_lib, "gpucoll", "machine_code").absolute()
        problem = self.make(folder)
        if not problem:
            return
        if BUILD_FOR:
            raise SystemExit(f"setup.py: there is no machine code for {BUILD_FOR}: {problem}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "not_made.txt").write_text(f"the build made none: {problem}\n", encoding="utf-8")
        self.warn(f"gpucoll is built without machine code, so its first run compiles: {problem}")

    def make(self, folder: Path) -> str:
        """Make the machine code in a process of its own; return why that failed."""
        mine = ("GPUCOLL_", "NUMBA_", "PYTHON")
        kept = {name: text for name, text in os.environ.items() if not name.startswith(mine)}
        library = str(Path(self.build_lib).absolute())
        path = [entry for entry in sys.path if entry and Path(entry).resolve() != HERE]
        changes = {
            "GPUCOLL_BUILD_FOR": BUILD_FOR,
            "PYTHONPATH": os.pathsep.join([library, *path]),
            "PYTHONDONTWRITEBYTECODE": "1",  # or it would be packed
        }
        work = Path(self.build_temp).absolute() / "machine_code"
        command = [sys.executable, "-s", "-m", "gpucoll.backends.machine_code"]
        child = subprocess.Popen(
            [*command, str(folder), str(work)],
            cwd=library,
            env={**kept, **changes},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # it starts others, which shall end with it
        )
        try:
            said = child.communicate(timeout=MAKING_LIMIT_S)[1].strip()
        except subprocess.TimeoutExpired:
            return f"it took more than {MAKING_LIMIT_S} s"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if said:
            print(said, file=sys.stderr)
        if child.returncode == 0:
            return ""
        return said.splitlines()[-1] if said else f"exit code {child.returncode}"


if __name__ == "__main__":
    setup(
        version=version(),
        # Not in pyproject.toml: setuptools before 77 rejects the SPDX string there, and later ones
        # will reject the table that came before it. Here every one takes it.
        license="Apache-2.0",
        long_description=description(),
        long_description_content_type="text/markdown",
        packages=packages(),
        package_dir=PACKAGE_ROOTS,
        package_data={"": PACKAGE_DATA},
        include_package_data=False,
        cmdclass={"build_py": FreshBuild, "build_ext": MachineCode},
        distclass=WithMachineCode,
    )
