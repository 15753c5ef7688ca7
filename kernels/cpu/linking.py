"""All compiled loops, and the kernels that most programs need, as one shared library.

Numba produces LLVM bitcode, loop by loop. Linked together and optimised again, with only the loops
visible from outside, it needs nothing from Numba any more. What remains are the functions of libc
and CPython that loops declare (`jit.ExternalFunction`). Any other function would be Numba's, to
raise an exception or to count references, and such code is refused.

Kernels are emitted as final vector code; no optimisation passes run on them, here or elsewhere.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import llvmlite.binding as llvm
from llvmlite import ir

from gpucoll.kernels.cpu import library_trial
from gpucoll.kernels.cpu.codegen import library_machine
from gpucoll.kernels.cpu.elf_library import link
from gpucoll.kernels.cpu.elf_object import LinkError, read_object
from gpucoll.kernels.cpu.jit import ExternalFunction, Loop

__all__ = ["linked", "linked_kernel", "target_of_numba", "try_out"]

_SPEED_LEVEL = 2
_TRIAL_S = 60.0
_OF_COMPILERS = frozenset({"memcpy", "memmove", "memset"})
"""Functions of libc that LLVM itself may call."""
_BEGINNING = """\
source_filename = "gpucoll"
!llvm.module.flags = !{!0, !1}
!0 = !{i32 8, !"PIC Level", i32 2}
!1 = !{i32 7, !"RtLibUseGOT", i32 1}
"""


def target_of_numba() -> llvm.TargetMachine:
    """Return a target machine like Numba's for this processor, for position-independent code."""
    from numba.core import config
    from numba.core.codegen import get_host_cpu_features

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    features = config.CPU_FEATURES
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=config.CPU_NAME or llvm.get_host_cpu_name(),
        features=get_host_cpu_features() if features is None else features,
        opt=3,
        reloc="pic",
        codemodel="small",
    )


def linked(
    loops: Iterable[Loop],
    kernels: Iterable[tuple[str, ir.Function]],
    machine: llvm.TargetMachine | None = None,
) -> bytes:
    """Return the shared library of loops and of kernels, the latter with the given names.

    It is for this processor unless `machine` is one for others.

    Raises
    ------
    LinkError
        A loop needs a function that none of them declares, or the linker fails.
    """
    whole, machine = together(loops, machine)
    for symbol, function in kernels:
        _add(whole, llvm.parse_assembly(str(function.module)), function.name, symbol)
    return emit(whole, machine, ExternalFunction.declared | _OF_COMPILERS)


def together(
    loops: Iterable[Loop], machine: llvm.TargetMachine | None = None
) -> tuple[llvm.ModuleRef, llvm.TargetMachine]:
    """Return one optimised LLVM module of these loops, and the target machine for it."""
    machine = machine or target_of_numba()
    whole = llvm.parse_assembly(_BEGINNING)
    whole.triple, whole.data_layout = machine.triple, str(machine.target_data)
    for loop in loops:
        made = loop.numba
        module = llvm.parse_bitcode(made._library._get_module_for_linking().as_bitcode())
        _add(whole, module, made.native_name, loop.symbol)
    _optimise(whole, machine)
    return whole, machine


def linked_kernel(symbol: str, function: ir.Function) -> bytes:
    """Return the shared library of one kernel, which needs no external functions."""
    machine = library_machine()
    module = llvm.parse_assembly(str(function.module))
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    module.get_function(function.name).name = symbol
    return emit(module, machine, ())


def _add(whole: llvm.ModuleRef, module: llvm.ModuleRef, name: str, symbol: str) -> None:
    """Add a module with one function that is visible from outside, under another name."""
    module.triple, module.data_layout = whole.triple, whole.data_layout
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration:
            value.linkage = "internal"  # Numba's names are unique only within one process
    function = module.get_function(name)
    function.linkage, function.name = "external", symbol
    whole.link_in(module)


def _optimise(module: llvm.ModuleRef, machine: llvm.TargetMachine) -> None:
    options = llvm.create_pipeline_tuning_options(speed_level=_SPEED_LEVEL)
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)


def emit(module: llvm.ModuleRef, machine: llvm.TargetMachine, allowed: Iterable[str]) -> bytes:
    """Return the shared library of a module that needs only the allowed external functions."""
    for function in module.functions:
        if function.is_declaration and not function.name.startswith("llvm."):
            function.add_function_attribute("nonlazybind")  # called through the table of addresses
    module.verify()
    made = machine.emit_object(module)
    needed = read_object(made).needed()
    if unknown := sorted(needed.difference(allowed)):
        raise LinkError(
            f"compiled loops need {', '.join(unknown)}, which none of them declares: a loop raises "
            "an exception or makes a Python object (return a status instead), or calls a C "
            "function without types.ExternalFunction"
        )
    return link(made)


def try_out(path: Path) -> None:
    """Load a library in a separate process and run some of it; LinkError if that fails.

    The linker's output has never run on any processor but this one's, so a fault must crash that
    process and not the user's.
    """
    command = [sys.executable, "-I", "-S", library_trial.__file__, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TRIAL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LinkError(f"the library could not be tried: {error}") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise LinkError(f"the library does not work here: {said[0]}")
