"""What imports what: held by reading the sources, and by looking at what ``import gpucoll`` loads.

The order of the layers themselves is import-linter's (pyproject.toml); these tests need no tool.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

from gpucoll.backends import precompile

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src/gpucoll", "kernels", "backends", "bench")
BARE_NAMES = {"src", "kernels", "backends", "bench"}

# Each is loaded when first needed: all are slow to import, and no machine has them all.
NEVER_BY_IMPORT = ["numba", "llvmlite", "cupy", "mpi4py", "torch", "jax", "cloudpickle"]

# A rank on one host that has reduced an array and closed has loaded none of these.
NEVER_BY_A_RANK = [
    *(*NEVER_BY_IMPORT, "asyncio", "hashlib", "importlib.metadata", "logging", "multiprocessing"),
    *(
        "numpy.ctypeslib",
        "queue",
        "secrets",
        "shutil",
        "ssl",
        "subprocess",
        "sysconfig",
        "tempfile",
    ),
    *("tempfile", "gpucoll.api.description", "gpucoll.arrays.dlpack", "gpucoll.compression"),
    *("gpucoll.backends.compressed", "gpucoll.backends.cpu.world", "gpucoll.backends.gpu"),
    *("gpucoll.calls.compressed", "gpucoll.calls.gpu.cache", "gpucoll.calls.gpu.call"),
    *("gpucoll.calls.gpu.work", "gpucoll.devices", "gpucoll.group.survivors"),
    *("gpucoll.group.world", "gpucoll.rendezvous.guest", "gpucoll.rendezvous.host"),
    *("gpucoll.rendezvous.meeting_points", "gpucoll.transport.tcp"),
]

# Who may use the public face of the package, ``gpucoll.<name>``. For a lower layer that would be an
# import upwards: ``gpucoll/__init__.py`` stands on all of them.
ABOVE_THE_API = (
    *("src/gpucoll/launcher", "src/gpucoll/testing", "src/gpucoll/doctor", "bench"),
    *("src/gpucoll/integrations", "src/gpucoll/training"),
    *("src/gpucoll/tables", "src/gpucoll/federated"),
)


# A group's segment, context and members are its own, and of the loops compiled against them.
PRIVATE_OF_A_GROUP = {"context", "members", "segment"}
INSIDE_A_GROUP = ("src/gpucoll/group/host", "backends/cpu/host")

# Schedules are pure functions: whoever runs them brings arrays, processes and sockets.
BELOW_SCHEDULES = ("algorithms", "collectives", "errors", "wording")
NOT_IN_SCHEDULES = {"numpy", "socket", "multiprocessing", "threading", "subprocess", "ctypes"}


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def imported_modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the absolute name of what each import statement of a file names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; write gpucoll..."
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@functools.cache
def is_module(name: str) -> bool:
    """Return whether ``gpucoll.<name>`` is a module or a package."""
    if not name:
        return False
    places = [ROOT / name] if name in BARE_NAMES else [ROOT / "src/gpucoll" / name]
    return any(place.is_dir() or place.with_suffix(".py").is_file() for place in places)


def offences(file: str, source: str) -> Iterator[str]:
    """Yield what a source imports or reaches that it may not."""
    tree = ast.parse(source)
    for line, name in imported_modules(tree):
        package, _, rest = name.partition(".")
        module = rest.split(".")[0]
        if package in BARE_NAMES:
            yield f"{file}:{line}: {name} would be a second copy; import gpucoll.{name}"
        if package == "gpucoll" and not (is_module(module) or may_use_the_public_face(file)):
            yield f"{file}:{line}: {name}: import it from the module that defines it"
        if file.startswith("src/gpucoll/algorithms/") and (
            package in NOT_IN_SCHEDULES or (package == "gpucoll" and module not in BELOW_SCHEDULES)
        ):
            yield f"{file}:{line}: {name}: schedules are pure functions"
    if not file.startswith(INSIDE_A_GROUP):
        for node in ast.walk(tree):
            if is_private_of_a_group(node):
                text = f"{file}:{node.lineno}: {ast.unparse(node)}"
                yield f"{text}: ask by a method of gpucoll.group.protocol.Group"


def may_use_the_public_face(file: str) -> bool:
    return file.startswith(ABOVE_THE_API) or file == "src/gpucoll/__init__.py"


def is_private_of_a_group(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return (
        isinstance(node, ast.Attribute)
        and node.attr in PRIVATE_OF_A_GROUP
        and ast.unparse(node.value).rpartition(".")[2] in ("group", "_group")
    )


def test_what_sources_import_and_reach():
    files = ((path.relative_to(ROOT).as_posix(), path.read_text("utf-8")) for path in sources())
    assert [offence for file, source in files for offence in offences(file, source)] == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("src/gpucoll/memory/new.py", "import kernels.cpu"),
        ("src/gpucoll/memory/new.py", "from backends import choice"),
        ("src/gpucoll/memory/new.py", "import gpucoll"),
        ("src/gpucoll/memory/new.py", "from gpucoll import init"),
        ("src/gpucoll/memory/new.py", "self._group.context.words"),
        ("src/gpucoll/algorithms/new.py", "import numpy as np"),
        ("src/gpucoll/algorithms/new.py", "from gpucoll.group import protocol"),
    ],
)
def test_what_they_may_not_is_found(file, source):
    assert len(list(offences(file, source))) == 1


def test_every_module_with_loops_is_listed():
    found = set()
    for path in sources():
        if re.search(r"^@compiled\b|^@compiled_when_used\(", path.read_text("utf-8"), re.M):
            name = path.relative_to(ROOT).with_suffix("").as_posix().removeprefix("src/gpucoll/")
            found.add("gpucoll." + name.replace("/", "."))
    assert found == {*precompile.MODULES, *precompile.MODULES_WHEN_USED}


def printed(program):
    """Return what a program prints in a process of its own."""
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    return process.stdout


def test_schedules_load_no_arrays():
    program = (
        "import sys, gpucoll.algorithms.table\n"
        "print([name for name in ('numpy', 'numba', 'socket') if name in sys.modules])\n"
    )

    assert printed(program).strip() == "[]"


def test_import_gpucoll_loads_nothing_heavy():
    program = (
        "import sys, gpucoll\n"
        f"print([name for name in {NEVER_BY_IMPORT!r} if name in sys.modules])\n"
    )

    assert printed(program).strip() == "[]"


def test_a_rank_on_one_host_loads_what_it_needs():
    precompile.ensure_compiled()
    program = (
        "import sys, numpy, gpucoll\n"
        "before = set(sys.modules)\n"
        "with gpucoll.init(rank=0, world_size=1) as comm:\n"
        "    comm.all_reduce(numpy.ones(8))\n"
        f"print([n for n in {NEVER_BY_A_RANK!r} if n in sys.modules and n not in before])\n"
    )

    assert printed(program).strip() == "[]"


def test_a_rank_between_hosts_loads_schedules_with_its_first_large_call():
    program = (
        "import sys, gpucoll.backends.cpu.world.backend as backend\n"
        "names = 'gpucoll.algorithms.table', 'gpucoll.backends.cpu.world.large_movements'\n"
        "print([name in sys.modules for name in names])\n"
        "backend.large_calls()\n"
        "print([name in sys.modules for name in names])\n"
    )

    assert printed(program).splitlines() == ["[False, False]", "[True, True]"]


def test_a_look_at_plain_arrays_loads_no_masked_ones():
    program = (
        "import sys, numpy\n"
        "from gpucoll.arrays import numpy_arrays\n"
        "numpy_arrays.look(numpy.ones(8), 'x')\n"
        "numpy_arrays.look_at_out(numpy.ones(8))\n"
        "print('numpy.ma' in sys.modules)\n"
    )

    assert printed(program).strip() == "False"
