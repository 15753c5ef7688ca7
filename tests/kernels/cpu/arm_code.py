"""Prints, as JSON, the LLVM IR of all compiled entries and of the functions that order memory.

A script: Numba is made to compile for the triple that it is given, and what it makes is never run.
"""

from __future__ import annotations

import dis
import importlib
import json
import pkgutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import llvmlite.binding as llvm

from gpucoll.backends.precompile import MODULES_WHEN_USED
from gpucoll.kernels.cpu.cache_key import COMPILED_FOLDERS
from gpucoll.kernels.cpu.jit import Inlined, Loop

ORDERING = (
    "add32", "compare_exchange64", "exchange32", "exchange64", "fence_acquire", "fence_full",
    "load32_acquire", "load32_ordered", "load64_acquire", "load64_ordered", "store32_release",
    "store64_release",
)  # fmt: skip
"""What in `gpucoll.kernels.cpu.memory` orders what is loaded and stored."""


def modules() -> Iterator[Any]:
    """Import every module that may have compiled functions of the CPU's."""
    for folder in (name.replace("/", ".") for name in COMPILED_FOLDERS if name != "kernels/cpu"):
        package = importlib.import_module(f"gpucoll.{folder}")
        for found in pkgutil.iter_modules(package.__path__):
            yield importlib.import_module(f"gpucoll.{folder}.{found.name}")
    for name in MODULES_WHEN_USED:
        yield importlib.import_module(name)


def python_of(value: Any) -> Callable[..., Any] | None:
    """Return the Python function that was compiled, or is to be inlined; None: something else."""
    return value.py_func if isinstance(value, Inlined | Loop) else None


def reached(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Return the globals that a function's code names."""
    for instruction in dis.get_instructions(function):  # attributes have such names, too
        name = instruction.argval
        if instruction.opname == "LOAD_GLOBAL" and name in function.__globals__:
            yield name, function.__globals__[name]


def reaches(function: Callable[..., Any], known: dict[str, set[str]]) -> set[str]:
    """Return the names of functions that order memory which a function comes to call."""
    own = f"{function.__module__}.{function.__name__}"
    if own not in known:
        known[own] = set()
        found = set()
        for name, value in reached(function):
            inner = python_of(value)
            if inner is not None:
                found |= reaches(inner, known)
            elif name in ORDERING:
                found.add(own)
        known[own] = found
    return known[own]


def main(triple: str) -> dict[str, dict[str, Any]]:
    entries, functions, calls = {}, {}, {}
    known: dict[str, set[str]] = {}
    for module in modules():
        for value in vars(module).values():
            function = python_of(value)
            if function is None or function.__module__ != module.__name__:
                continue
            name = f"{function.__module__}.{function.__name__}"
            found = reaches(function, known)
            if isinstance(value, Loop):
                entries[name] = value.numba.inspect_llvm()
                calls[name] = sorted(found)
            elif name in found:
                value.dispatcher.compile(value.types)
                functions[name] = value.dispatcher.inspect_llvm(value.types)
    return {"entries": entries, "functions": functions, "calls": calls}


if __name__ == "__main__":
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.get_process_triple = lambda: sys.argv[1]
    json.dump(main(sys.argv[1]), sys.stdout)
