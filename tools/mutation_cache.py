"""Fill the cache of compiled code for the tree that is on the path.

::

    python tools/mutation_cache.py TARGET        # compile everything that tests need
    python tools/mutation_cache.py TARGET BASE   # copy from the cache of another tree

The name of a cache's folder is a hash of all sources, so one changed line would have every loop
compiled again: a minute and more. A loop is copied if all that it is compiled from is the same: the
bytecode, the constants, and the same of each function that it calls. If a module changed that makes
machine code, nothing is copied.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, get_type_hints

from gpucoll import blocks, codes
from gpucoll.blocks import Block, BlockClass, kinds
from gpucoll.codes import CodesClass
from gpucoll.kernels.cpu.jit import Inlined, Loop

MANAGING = {
    *("cache", "cache_key", "kept_loops", "kernel_files", "library", "library_trial"),
    *("levels", "loop_cache", "loop_files", "lost", "own_folders", "packaged", "private_folder"),
}
"""Modules of ``kernels/cpu`` on which no machine code depends."""
FACTS = "facts.json"


def facts() -> dict[str, str]:
    """Return a digest for each loop, and one of the modules that make machine code."""
    from gpucoll.backends import precompile
    from gpucoll.kernels.cpu import cache, jit

    found = {}
    for module in (*precompile.MODULES, *precompile.MODULES_WHEN_USED):
        importlib.import_module(module)
        for loop in jit.loops_of(module):
            found[f"{loop.__name__}-{module}"] = _digest("\n".join(_parts(loop, set())).encode())
    files = sorted(Path(cache.__file__).parent.glob("*.py"))
    makers = [file.read_bytes() for file in files if file.stem not in MANAGING]
    makers += [Path(str(module.__file__)).read_bytes() for module in (blocks, codes)]
    return found | {"makers": _digest(b"".join(makers))}


def _parts(value: Any, seen: set[int]) -> Iterator[str]:
    """Yield what the code of a function depends on."""
    function = getattr(value, "py_func", None) or getattr(value, "_generate", value)
    code = getattr(function, "__code__", None)
    if isinstance(value, BlockClass):
        yield from _parts_of_block(value, seen)
    elif isinstance(value, CodesClass):
        members: Any = value
        yield repr([(member.name, int(member)) for member in members])
    elif code is None:
        yield re.sub(" at 0x[0-9a-f]+", "", repr(value))
    elif id(code) not in seen:
        seen.add(id(code))
        yield from map(repr, (function.__module__, function.__name__, function.__defaults__))
        declared = get_type_hints(function) if isinstance(value, Inlined | Loop) else {}
        for kind in declared.values():
            yield from _parts(kind, seen)
        for cell in function.__closure__ or ():
            yield from _parts(cell.cell_contents, seen)
        yield from _parts_of_code(code, function.__globals__, seen)


def _parts_of_block(block: Any, seen: set[int]) -> Iterator[str]:
    yield repr(block)
    if id(block) not in seen and issubclass(block, Block):
        seen.add(id(block))
        yield repr([(field.name, int(field), field.count) for field in block.fields.values()])
        for kind in kinds(block).values():
            yield from _parts(kind, seen)


def _parts_of_code(code: CodeType, around: dict[str, Any], seen: set[int]) -> Iterator[str]:
    yield repr((code.co_code, code.co_names, code.co_varnames))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts_of_code(constant, around, seen)
        else:
            yield repr(constant)
    for name in code.co_names:
        value = around.get(name)
        if isinstance(value, ModuleType):
            for attribute in code.co_names:
                yield from _parts(getattr(value, attribute, None), seen)
        else:
            yield from _parts(value, seen)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o600)


def copy(base: Path, folder: Path, same: set[str]) -> bool:
    """Copy what is the same; return whether it is everything."""
    from gpucoll.backends import precompile
    from gpucoll.kernels.cpu import jit

    checksums = {"kernels.so": ""}  # a library without a file: the loops beside it are used
    for path in base.glob("*.nb?"):
        if path.name.rsplit("-", 1)[0] in same:
            data = path.read_bytes().replace(base.name.encode(), folder.name.encode())
            _write(folder / path.name, data)
            checksums[path.name] = _digest(data)
    is_whole = len(checksums) == 1 + len(list(base.glob("*.nb?")))
    if is_whole:
        library = (base / "kernels.so").read_bytes()
        _write(folder / "kernels.so", library)
        checksums["kernels.so"] = _digest(library)
    _write(folder / "complete", json.dumps(checksums).encode())
    if not is_whole:
        precompile.load()  # this makes the folder anew
    for module in precompile.MODULES_WHEN_USED:
        for loop in jit.loops_of(module):
            for path in base.glob(f"{loop.symbol}-*.so"):
                if f"{loop.__name__}-{module}" in same:
                    _write(folder / loop.path().name, path.read_bytes())  # type: ignore[attr-defined]
                else:
                    is_whole = False
    for path in base.glob("*.so"):
        if path.name != "kernels.so" and "-" not in path.name:
            _write(folder / path.name, path.read_bytes())
    return is_whole


def main(target: str, base: str = "") -> None:
    """Run the command line."""
    sys.path.insert(0, "")
    from gpucoll.backends import precompile
    from gpucoll.kernels.cpu.cache import cache_folder

    mine, folder = facts(), cache_folder()
    _write(Path(target) / FACTS, json.dumps(mine).encode())
    if base:
        theirs = json.loads((Path(base) / FACTS).read_text())
        same = {name for name, digest in mine.items() if theirs.get(name) == digest}
        found = next(Path(base).glob("loops-*[0-9a-f]"))
        if "makers" in same and copy(found, folder, same):
            return
    precompile.load()
    from tests.compiling import load_kernels
    from tests.dtypes import covering
    from tests.ranks import prepare_for_ranks

    prepare_for_ranks()
    load_kernels(covering())


if __name__ == "__main__":
    main(*sys.argv[1:])
