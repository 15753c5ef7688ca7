"""What a build holds: every module of the four roots, nothing else, and commands that exist."""

from __future__ import annotations

import configparser
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
from email.parser import Parser
from pathlib import Path

import pytest

import gpucoll
from gpucoll import config
from gpucoll.kernels.cpu import packaged
from gpucoll.kernels.cpu.levels import levels_here, of_this_machine
from gpucoll.version import __version__

ROOT = Path(__file__).resolve().parent.parent
PLACES = {
    "gpucoll": "src/gpucoll",
    "gpucoll/kernels": "kernels",
    "gpucoll/backends": "backends",
    "gpucoll/bench": "bench",
}
SHIPPED = (".py", ".typed", ".cu", ".h")


def expected_files() -> set[str]:
    """Return what an installation holds, from the sources as they lie there."""
    return {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for package, folder in PLACES.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SHIPPED
    }


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def start_setup(
    tree: Path, *arguments: str, timeout_s: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", *arguments]
    environment = {name: text for name, text in os.environ.items() if name != config.BUILD_FOR}
    return subprocess.run(
        command,
        cwd=tree,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def run_setup(tree: Path, *arguments: str, timeout_s: float = 120, **variables: str) -> None:
    process = start_setup(tree, *arguments, timeout_s=timeout_s, **variables)
    assert process.returncode == 0, process.stdout + process.stderr


def built(tree: Path) -> Path:
    """Return the folder in which a build has put the package."""
    (folder,) = (tree / "build").glob("lib*")
    return folder


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """Copy what a build needs, so that nothing is written into the checkout; build there."""
    pytest.importorskip("setuptools")
    tree = tmp_path_factory.mktemp("build") / "gpucoll"
    skip = shutil.ignore_patterns("__pycache__", "*.pyc")
    for folder in PLACES.values():
        shutil.copytree(ROOT / folder, tree / folder, ignore=skip)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tree)
    run_setup(tree, "egg_info", "build_py")
    return tree


def test_build_holds_every_file_of_the_four_roots_and_no_other(tree: Path):
    assert files_below(built(tree)) == expected_files()


@pytest.mark.parametrize("package", PLACES)
def test_build_holds_each_storey(tree: Path, package: str):
    assert (built(tree) / package / "__init__.py").is_file()


def test_build_is_marked_as_typed(tree: Path):
    assert (built(tree) / "gpucoll/py.typed").is_file()


def test_build_drops_what_an_earlier_one_left(tree: Path):
    stale = built(tree) / "gpucoll/deleted_since.py"
    stale.touch()

    run_setup(tree, "build_py")

    assert not stale.exists()


@pytest.mark.soak
def test_source_distribution_builds_the_same_package(tree: Path, tmp_path: Path):
    run_setup(tree, "sdist", "--formats=gztar", "--dist-dir", str(tmp_path))
    (archive,) = tmp_path.glob("*.tar.gz")
    # Older patch releases of 3.10 and 3.11 have no filters; newer Pythons want one named.
    with tarfile.open(archive) as packed:
        if hasattr(tarfile, "data_filter"):
            packed.extraction_filter = tarfile.data_filter
        packed.extractall(tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()

    run_setup(unpacked, "build_py")

    assert files_below(built(unpacked)) == expected_files()
    assert (unpacked / "LICENSE").is_file()


class TestMachineCode:
    @pytest.fixture
    def without_numba(self, tmp_path):
        (tmp_path / "hidden/numba").mkdir(parents=True)
        (tmp_path / "hidden/numba/__init__.py").write_text("raise ImportError('no Numba here')\n")
        return str(tmp_path / "hidden")

    def test_a_build_without_numba_says_so(self, tree: Path, tmp_path: Path, without_numba: str):
        done = start_setup(
            tree, "build", "--build-base", str(tmp_path / "build"), PYTHONPATH=without_numba
        )

        assert done.returncode == 0, done.stderr
        assert "without machine code, so its first run compiles: ImportError: no" in done.stderr
        folder = built(tmp_path) / "gpucoll/machine_code"
        assert files_below(folder) == {"not_made.txt"}
        said = packaged.look(folder, "", []).problem
        assert said == "the build made none: ImportError: no Numba here"

    def test_levels_that_a_builder_names_must_be_made(
        self, tree: Path, tmp_path: Path, without_numba: str
    ):
        base = ("build", "--build-base", str(tmp_path / "build"))
        done = start_setup(tree, *base, PYTHONPATH=without_numba, GPUCOLL_BUILD_FOR="all")
        assert done.returncode != 0
        assert "there is no machine code for all: ImportError: no Numba here" in done.stderr

    def test_a_level_that_there_is_not(self, tree: Path, tmp_path: Path):
        base = ("build", "--build-base", str(tmp_path / "build"))
        done = start_setup(tree, *base, GPUCOLL_BUILD_FOR="pdp-11")
        assert done.returncode != 0
        assert "pdp-11 is none of the levels of this machine: " in done.stderr

    def test_none_at_all(self, tree: Path, tmp_path: Path):
        run_setup(tree, "build", "--build-base", str(tmp_path / "build"), GPUCOLL_BUILD_FOR="none")

        assert built(tmp_path) == tmp_path / "build/lib"  # of every platform
        assert files_below(built(tmp_path)) == expected_files()

    @pytest.mark.soak
    def test_a_wheel_for_all_levels(self, tree: Path, tmp_path: Path):
        """A rank that it serves loads no compiler, and writes nothing."""
        base = ("build", "--build-base", str(tmp_path / "build"))
        wheel = ("bdist_wheel", "--dist-dir", str(tmp_path / "dist"))
        run_setup(tree, *base, *wheel, timeout_s=600, GPUCOLL_BUILD_FOR="all")

        (archive,) = (tmp_path / "dist").glob("*.whl")
        assert archive.stat().st_size < 10 << 20
        assert re.search(rf"-cp{sys.version_info[0]}{sys.version_info[1]}-.*-linux_", archive.name)
        shutil.unpack_archive(archive, tmp_path / "site", "zip")
        names = files_below(tmp_path / "site/gpucoll/machine_code")
        assert len(names) == packaged.N_PARTS * len(of_this_machine())
        home = tmp_path / "home"
        home.mkdir()
        program = (
            "import sys, gpucoll, numpy as np\n"
            "with gpucoll.init() as comm:\n"
            "    assert comm.all_reduce(np.ones(3)).tolist() == [1, 1, 1]\n"
            "print([name for name in ('numba', 'llvmlite') if name in sys.modules])\n"
            "from gpucoll.kernels.cpu import packaged; print(packaged.fit().level)\n"
        )
        hidden = ("GPUCOLL_", "NUMBA_", "XDG_")
        environment = {
            name: text for name, text in os.environ.items() if not name.startswith(hidden)
        }
        environment.update(HOME=str(home), PYTHONPATH=str(tmp_path / "site"))
        command = [sys.executable, "-c", program]
        said = subprocess.check_output(command, env=environment, text=True, timeout=60)
        assert said.splitlines() == ["[]", levels_here()[0].name]
        assert not list(home.iterdir())


def test_version_is_the_same_everywhere(tree: Path):
    metadata = Parser().parsestr((tree / "gpucoll.egg-info/PKG-INFO").read_text(encoding="utf-8"))

    assert metadata["Version"] == __version__ == gpucoll.__version__


def test_an_index_shows_the_readme_without_links_to_files(tree: Path):
    text = (tree / "gpucoll.egg-info/PKG-INFO").read_text(encoding="utf-8")
    metadata = Parser().parsestr(text)
    shown = str(metadata.get_payload())

    assert metadata["Description-Content-Type"].startswith("text/markdown")
    assert "# gpucoll" in shown
    assert "gpucoll-run -n 2 train.py" in shown
    assert not re.findall(r"\]\((?!https?:)", shown)
    assert "<!--" not in shown
    assert "<picture>" not in shown
    assert "--compare" not in shown


def test_console_scripts_exist(tree: Path):
    entry_points = configparser.ConfigParser()
    entry_points.read(tree / "gpucoll.egg-info/entry_points.txt")
    scripts = dict(entry_points["console_scripts"])

    assert set(scripts) == {"gpucoll", "gpucoll-run", "gpucoll-bench", "gpucoll-doctor"}
    for target in scripts.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_pytest_finds_the_plugin(tree: Path):
    entry_points = configparser.ConfigParser()
    entry_points.read(tree / "gpucoll.egg-info/entry_points.txt")

    assert dict(entry_points["pytest11"]) == {"gpucoll": "gpucoll.testing"}


def test_installed_package_is_this_checkout():
    """Else the tests would judge another gpucoll than the one that lies here."""
    installed = Path(gpucoll.__file__).parent
    # Through the link tree it is this checkout by construction; nothing is installed then.
    different = [
        name
        for name in sorted(expected_files())
        if not (copy := installed.parent / name).is_file()
        or copy.read_bytes() != source_of(name).read_bytes()
    ]

    assert not different, f"install again (pip install .): {installed} differs in {different}"


def source_of(name: str) -> Path:
    """Return the source of an installed file."""
    package = max((place for place in PLACES if name.startswith(f"{place}/")), key=len)
    return ROOT / PLACES[package] / name.removeprefix(f"{package}/")
