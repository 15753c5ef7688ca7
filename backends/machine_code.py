"""Make the machine code that goes into the package. ``setup.py`` runs this in its own process.

Several processes at once each compile some of the modules with Numba. From what each has, it then
optimises and emits one library for each level of processors: Numba's work is the larger part, and
is done once for all levels.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from gpucoll import config
from gpucoll.backends.precompile import MODULES, MODULES_BETWEEN_HOSTS
from gpucoll.errors import ArgumentError, BackendUnavailableError
from gpucoll.kernels.cpu import cache, packaged
from gpucoll.kernels.cpu.addresses import Kernel, linked_kernels, packaged_kernels
from gpucoll.kernels.cpu.cache_key import key, packaged_digest
from gpucoll.kernels.cpu.kernel_files import keep_content, kept_content
from gpucoll.kernels.cpu.levels import Level, levels_here, of_this_machine

_NAME = "gpucoll.backends.machine_code"


class _Part(NamedTuple):
    modules: Sequence[str]
    kernels: Callable[[], Iterator[Kernel]]


_PARTS = (  # the one that takes longest first; it has all that `library_trial` calls
    _Part(MODULES[: -cache.N_ELSEWHERE], linked_kernels),
    _Part(MODULES[-cache.N_ELSEWHERE :], lambda: iter(())),
    _Part(MODULES_BETWEEN_HOSTS, packaged_kernels),
)
assert len(_PARTS) == packaged.N_PARTS


def asked_levels() -> list[Level]:
    """Return the levels to make code for: those that the builder names, or this processor's best.

    Raises
    ------
    ArgumentError
        A name is unknown.
    BackendUnavailableError
        None is named, and this processor reaches no level.
    """
    possible = {level.name: level for level in of_this_machine()}
    asked = config.build_for()
    if not asked:
        if not (here := levels_here()):
            raise BackendUnavailableError("this processor reaches no level that is made ahead")
        return here[:1]
    names = possible if asked == "all" else asked.replace(",", " ").split()
    if unknown := [name for name in names if name not in possible]:
        raise ArgumentError(
            f"{config.BUILD_FOR}={asked}: {unknown[0]} is none of the levels of this machine: "
            f"{', '.join(possible)}; all, or none, are possible, too"
        )
    return [level for level in possible.values() if level.name in names]


def make(folder: Path, work: Path) -> None:
    """Put the machine code of the levels asked for into a folder.

    Parameters
    ----------
    folder : Path
        The folder in the package.
    work : Path
        The build's own folder. What an earlier build left there of the same sources, compilers and
        processor is not made again.
    """
    import numba  # noqa: F401 (without it nothing is begun, and the last line says so)

    levels, digest = asked_levels(), packaged_digest()
    kept = work / key()
    folder.mkdir(parents=True, exist_ok=True)
    kept.mkdir(parents=True, exist_ok=True)
    n_processes = min(len(os.sched_getaffinity(0)), len(_PARTS))
    with ThreadPoolExecutor(n_processes) as pool:
        list(pool.map(partial(_make_part, kept, levels, digest), range(len(_PARTS))))
    runs_here = levels_here()
    for level in levels:
        files = [kept / packaged.file_name(level.name, part, digest) for part in range(len(_PARTS))]
        if level in runs_here:
            from gpucoll.kernels.cpu.linking import try_out

            try_out(files[0])
        for file in files:
            shutil.copyfile(file, folder / file.name)  # with the usual rights


def _make_part(kept: Path, levels: Sequence[Level], digest: str, part: int) -> None:
    """Have another process make what is missing of one part."""
    files = {level: kept / packaged.file_name(level.name, part, digest) for level in levels}
    missing = {level: file for level, file in files.items() if kept_content(file) is None}
    if not missing:
        return
    lowest = next(iter(missing))  # whatever Numba makes must run on all of them
    numba = {"NUMBA_CPU_NAME": lowest.llvm_name, "NUMBA_CPU_FEATURES": lowest.llvm_features}
    wanted = [text for level, file in missing.items() for text in (level.name, str(file))]
    command = [sys.executable, "-m", _NAME, "part", str(part), *wanted]
    environment = {**os.environ, **numba}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ChildProcessError(last[0])


def _compile_part(number: int, files: dict[str, Path]) -> None:
    """Compile a part's loops in this process, and write their library for each level."""
    import importlib

    from gpucoll.kernels.cpu import jit

    part = _PARTS[number]
    with tempfile.TemporaryDirectory(prefix="gpucoll-build-") as unused:
        cache.build_into(Path(unused))  # Numba's own files, which nobody needs
        for module in part.modules:
            importlib.import_module(module)
            jit.compile_module(module)
    for level in of_this_machine():
        if level.name in files:
            _in_child(partial(_emit, part, level, files[level.name]))


def _emit(part: _Part, level: Level, file: Path) -> None:
    from gpucoll.kernels.cpu import codegen, jit, linking

    codegen.make_for(level)
    loops = [loop for module in part.modules for loop in jit.loops_of(module)]
    kernels = [(kernel.name, kernel.emit()) for kernel in part.kernels()]
    keep_content(file, linking.linked(loops, kernels, codegen.library_machine()))


def _in_child(work: Callable[[], None]) -> None:
    """Do work in a fork: what depends on the level is then new for each."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:  # the child has said why, unless it was killed
        sys.exit(code if code > 0 else f"a process was ended by signal {-code}")


if __name__ == "__main__":
    if sys.argv[1] == "part":
        named = sys.argv[3:]
        _compile_part(int(sys.argv[2]), dict(zip(named[::2], map(Path, named[1::2]), strict=True)))
    else:
        make(Path(sys.argv[1]), Path(sys.argv[2]))
