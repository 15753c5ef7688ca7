"""Build gpucoll: four top-level folders become the one package ``gpucoll``.

Everything that can be said declaratively is in ``pyproject.toml``. What stands here cannot be:
which folder becomes which part of the package, the version, the licence, and a clean build.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
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
        cmdclass={"build_py": FreshBuild},
    )
