"""What a build holds: every module of the four roots, nothing else, and commands that exist."""

from __future__ import annotations

import configparser
import ctypes
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import gpucoll
from gpucoll import config
from gpucoll.kernels.cpu import packaged
from gpucoll.kernels.cpu.levels import levels_here, of_this_machine
from gpucoll.version import __version__

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import pythons  # noqa: E402
import release  # noqa: E402
import wheels  # noqa: E402

sys.path.remove(str(ROOT / "tools"))

PLACES = {
    "gpucoll": "src/gpucoll",
    "gpucoll/kernels": "kernels",
    "gpucoll/backends": "backends",
    "gpucoll/bench": "bench",
}


def expected_files() -> set[str]:
    """Return what an installation holds, from the sources as they lie there."""
    return wheels.package_files(ROOT)


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


def metadata_of(tree: Path) -> Message:
    return Parser().parsestr((tree / "gpucoll.egg-info/PKG-INFO").read_text(encoding="utf-8"))


def requirements_of(metadata: Message) -> dict[str, list[str]]:
    """Return what each extra requires, and under an empty name what gpucoll itself does."""
    found: dict[str, list[str]] = {
        "": [],
        **{name: [] for name in metadata.get_all("Provides-Extra", [])},
    }
    for line in metadata.get_all("Requires-Dist", []):
        requirement, _, condition = line.partition(";")
        found[condition.partition("==")[2].strip().strip("\"'")].append(requirement.strip())
    return found


def test_version_is_the_same_everywhere(tree: Path):
    assert metadata_of(tree)["Version"] == __version__ == gpucoll.__version__
    assert release.version_of(ROOT) == __version__  # and tests/tools/test_release.py


def test_an_index_names_the_pythons_of_the_readme(tree: Path):
    classifiers = metadata_of(tree).get_all("Classifier", [])
    named = [text.rpartition(" ")[2] for text in classifiers if "Python :: 3." in text]
    assert named == pythons.promised()


def test_the_page_on_installing_has_every_extra(tree: Path):
    """Its table names the packages of each, in order."""
    text = (ROOT / "docs/installing.md").read_text("utf-8")
    rows = re.findall(r"^\| (none|`[\w-]+`) \|.*?\| ([^|]+) \| [^|]+ \|$", text, re.MULTILINE)
    told = {
        name.strip("`").replace("none", ""): re.findall(r"`([\w-]+)`", cell) for name, cell in rows
    }
    required = {
        extra: [
            re.split(r"[<>=!~ ]", name.removeprefix("gpucoll[").removesuffix("]"))[0]
            for name in names
        ]
        for extra, names in requirements_of(metadata_of(tree)).items()
    }
    assert {name: sorted(packages) for name, packages in told.items()} == {
        name: sorted(packages) for name, packages in required.items()
    }


def test_conda_requires_the_same(tree: Path):
    text = (ROOT / "packages/conda/recipe.yaml").read_text("utf-8")
    run, host = (text.partition(f"  {name}:\n")[2] for name in ("run", "host"))
    listed = [re.match(r"(?:    - .+\n)+", part) for part in (run, host)]
    assert all(listed)
    for_run, for_build = (
        {line.strip(" -").replace(" ", "") for line in part[0].splitlines()}
        for part in listed
        if part
    )
    metadata = metadata_of(tree)
    assert for_run == {f"python{metadata['Requires-Python']}", *requirements_of(metadata)[""]}
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    requires = re.findall('"([^"]+)"', re.findall(r"^requires = (.+)$", project, re.MULTILINE)[0])
    assert for_build == {"python", "pip", *requires}


@pytest.mark.soak
def test_conda_renders_a_package_for_each_python():
    rattler_build = pytest.importorskip("rattler_build", reason="needs py-rattler-build")
    described = vars(rattler_build)["Stage0Recipe"].from_file(
        str(ROOT / "packages/conda/recipe.yaml")
    )
    lines = "".join(f"  - {version}.*\n" for version in pythons.promised())
    variants = rattler_build.VariantConfig.from_yaml(f"python:\n{lines}")
    assert len(described.render(variants)) == len(pythons.promised())


@pytest.mark.soak
def test_the_citation_is_valid():
    citation = pytest.importorskip("cffconvert.cli.create_citation", reason="needs cffconvert")
    citation.create_citation(str(ROOT / "CITATION.cff"), None).validate()


def test_loops_call_no_newer_libc_than_wheels_ask_for():
    """auditwheel cannot tell: the symbols that our linker writes have no version."""
    lookup = ctypes.CDLL(None).dlvsym
    lookup.restype, lookup.argtypes = (
        ctypes.c_void_p,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p),
    )
    newest = int(wheels.GLIBC.partition("_")[2])
    versions = [b"GLIBC_2.2.5", *(b"GLIBC_2.%d" % minor for minor in range(3, newest + 1))]
    named = re.compile(r'ExternalFunction\(\s*"(\w+)"')
    sources = [path for folder in PLACES.values() for path in (ROOT / folder).rglob("*.py")]
    names = {name for path in sources for name in named.findall(path.read_text("utf-8"))}
    called = sorted(name for name in names if not name.startswith("Py"))
    assert {"clock_gettime", "syscall"} <= {*called}
    if platform.machine() == "x86_64" and lookup(None, b"malloc", versions[0]):
        newer = [n for n in called if not any(lookup(None, n.encode(), v) for v in versions)]
        assert not newer, f"wheels.GLIBC is {wheels.GLIBC}"


def test_an_index_shows_the_readme_without_links_to_files(tree: Path):
    metadata = metadata_of(tree)
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
