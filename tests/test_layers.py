"""What imports what: held by reading the sources, and by looking at what ``import gpucoll`` loads.

The order of the layers themselves is import-linter's (pyproject.toml); these tests need no tool.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src/gpucoll", "kernels", "backends", "bench")
BARE_NAMES = {"src", "kernels", "backends", "bench"}

# Each is loaded when first needed: all are slow to import, and no machine has them all.
NEVER_BY_IMPORT = ["numba", "llvmlite", "cupy", "mpi4py", "torch", "jax", "cloudpickle"]

# Who may use the public face of the package, ``gpucoll.<name>``. For a lower layer that would be an
# import upwards: ``gpucoll/__init__.py`` stands on all of them.
ABOVE_THE_API = (
    *("src/gpucoll/launcher", "src/gpucoll/testing", "src/gpucoll/doctor", "bench"),
    "src/gpucoll/integrations",
)


# A group's segment, context and members are its own, and of the loops compiled against them.
PRIVATE_OF_A_GROUP = {"context", "members", "segment"}
INSIDE_A_GROUP = ("src/gpucoll/group/host", "backends/cpu/host")

# Schedules are pure functions: whoever runs them brings arrays, processes and sockets.
BELOW_SCHEDULES = ("algorithms", "errors", "types", "wording")
NOT_IN_SCHEDULES = {"numpy", "socket", "multiprocessing", "threading", "subprocess", "ctypes"}


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the absolute name of what each import statement of a file names."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import; write gpucoll..."
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_module(name: str) -> bool:
    """Return whether ``gpucoll.<name>`` is a module or a package."""
    places = [ROOT / name] if name in BARE_NAMES else [ROOT / "src/gpucoll" / name]
    return any(place.is_dir() or place.with_suffix(".py").is_file() for place in places)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_folder_is_imported_by_its_bare_name(path: Path):
    bare = [name for name in imported_modules(path) if name.split(".")[0] in BARE_NAMES]

    assert not bare, f"import gpucoll.<name>: {bare} would be a second copy"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_lower_layers_do_not_use_the_public_face(path: Path):
    relative = path.relative_to(ROOT).as_posix()
    if relative.startswith(ABOVE_THE_API) or relative == "src/gpucoll/__init__.py":
        return
    upwards = [
        name
        for name in imported_modules(path)
        if name == "gpucoll" or (name.startswith("gpucoll.") and not is_module(name.split(".")[1]))
    ]

    assert not upwards, f"import these from the module that defines them: {upwards}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_group_keeps_to_itself(path: Path):
    if path.relative_to(ROOT).as_posix().startswith(INSIDE_A_GROUP):
        return
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    reached = [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in nodes
        if isinstance(node, ast.Attribute)
        and node.attr in PRIVATE_OF_A_GROUP
        and ast.unparse(node.value).rpartition(".")[2] in ("group", "_group")
    ]

    assert not reached, f"ask by a method of gpucoll.group.protocol.Group: {reached}"


def test_schedules_stand_on_words_alone():
    for path in sorted((ROOT / "src/gpucoll/algorithms").rglob("*.py")):
        for name in imported_modules(path):
            package, _, rest = name.partition(".")
            assert package not in NOT_IN_SCHEDULES, f"{path}: {name}"
            assert package != "gpucoll" or rest.split(".")[0] in BELOW_SCHEDULES, f"{path}: {name}"


def test_schedules_load_no_arrays():
    program = (
        "import sys, gpucoll.algorithms.table\n"
        "print([name for name in ('numpy', 'numba', 'socket') if name in sys.modules])\n"
    )

    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )

    assert process.stdout.strip() == "[]"


def test_import_gpucoll_loads_nothing_heavy():
    program = (
        "import sys, gpucoll\n"
        f"print([name for name in {NEVER_BY_IMPORT!r} if name in sys.modules])\n"
    )

    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )

    assert process.stdout.strip() == "[]"


def test_a_look_at_plain_arrays_loads_no_masked_ones():
    program = (
        "import sys, numpy\n"
        "from gpucoll.arrays import numpy_arrays\n"
        "numpy_arrays.look(numpy.ones(8), 'x')\n"
        "numpy_arrays.look_at_out(numpy.ones(8))\n"
        "print('numpy.ma' in sys.modules)\n"
    )

    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )

    assert process.stdout.strip() == "False"
