"""Kernels and loops lower for other processors: what they need is generic, or has its alternative.

LLVM's cross targets say so here; nothing is run. The kernels call nothing at all: a call to a
routine of compiler-rt would have nobody to answer it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import llvmlite.binding as llvm
import pytest
from tests.dtypes import ALLOWED, covering

from gpucoll.kernels.conversion import CONVERTIBLE
from gpucoll.kernels.cpu import copy, elements, pack_kernel, reduce
from gpucoll.kernels.cpu.addresses import HAS_STRING_COPY, INTO_SLOT, OUT_OF_SLOT, PLAIN
from gpucoll.kernels.cpu.block_codes import FORMATS
from gpucoll.kernels.cpu.convert import emit_add_scaled, emit_convert
from gpucoll.kernels.cpu.operations import OPERATIONS
from gpucoll.kernels.cpu.quantise import WIRE_FORMATS
from gpucoll.kernels.cpu.quantise_kernels import emit_dequantise, emit_quantise

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"


@dataclass(frozen=True)
class Processor:
    triple: str
    cpu: str
    features: tuple[str, ...]
    vector_bytes: int
    register: str
    """A pattern of the registers that vector code must use."""


PROCESSORS = {
    "sse2": Processor(X86, "x86-64", (), 16, r"%xmm"),
    "avx2": Processor(X86, "x86-64-v3", ("avx", "avx2", "f16c"), 32, r"%ymm"),
    "avx512": Processor(
        X86, "x86-64-v4", ("avx", "avx2", "avx512f", "avx512bw", "f16c"), 64, r"%zmm"
    ),
    "neon": Processor(ARM, "generic", ("neon",), 16, r"\b[vq]\d+\b"),
}


@pytest.fixture(scope="module", autouse=True)
def all_targets():
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()


@pytest.fixture(params=PROCESSORS)
def processor(request, monkeypatch):
    """Have kernels emitted as on this processor."""
    chosen = PROCESSORS[request.param]
    monkeypatch.setattr(elements, "host_features", lambda: frozenset(chosen.features))
    for user in ("reduce", "block_codes", "convert", "quantise_kernels"):
        monkeypatch.setattr(f"gpucoll.kernels.cpu.{user}.elements", elements.elements.__wrapped__)
    for user in ("reduce", "copy", "convert", "quantise_kernels", "pack_kernel"):
        module = f"gpucoll.kernels.cpu.{user}"
        monkeypatch.setattr(f"{module}.vector_bytes", lambda: chosen.vector_bytes)
    return chosen


def assembly(text: str, processor: Processor) -> str:
    """Return a module's code for a processor, from its LLVM IR."""
    features = ",".join(f"+{name}" for name in processor.features)
    machine = llvm.Target.from_triple(processor.triple).create_target_machine(
        cpu=processor.cpu, features=features, opt=3
    )
    module = llvm.parse_assembly(text)
    module.triple = processor.triple
    module.verify()
    return machine.emit_assembly(module)


def check_kernel(text: str, processor: Processor, name: str, *, is_vector: bool) -> None:
    assert "llvm.x86" not in text
    assert "llvm.aarch64" not in text
    code = assembly(text, processor)
    calls = re.findall(r"^\s+(?:callq?|bl)\s.*$", code, re.MULTILINE)
    assert not calls, f"{name} calls {calls}"
    if is_vector:
        assert re.search(processor.register, code), f"{name} has no {processor.register}"


def is_vectorised(dtype: str, op: str) -> bool:
    """Return whether the kernel has vector code: not for integer division and complex products."""
    is_complex, is_integer = dtype.startswith("complex"), dtype.startswith(("int", "uint"))
    return not (is_complex and op == "prod") and not (is_integer and op == "avg")


@pytest.mark.soak
def test_reduce_kernels(processor):
    for dtype, op in covering(9):
        element = elements.elements.__wrapped__()[dtype]  # the cached ones are this machine's
        is_product = element.kind == "c" and op == "prod"
        emitter = reduce.ComplexProductEmitter if is_product else reduce.ReduceEmitter
        function = emitter(element, OPERATIONS[op], f"reduce_{op}_{dtype}").emit()
        text = str(function.module)
        check_kernel(text, processor, f"{dtype} {op}", is_vector=is_vectorised(dtype, op))


def test_copy_kernels(processor):
    functions = [copy.emit_copy(kind) for kind in (PLAIN, INTO_SLOT, OUT_OF_SLOT)]
    for function in (*functions, copy.emit_refill(), copy.emit_streaming_copy()):
        check_kernel(str(function.module), processor, "copy", is_vector=True)


@pytest.mark.skipif(not HAS_STRING_COPY, reason="reads assembly of x86-64 alone")
@pytest.mark.parametrize("processor", ["sse2", "avx2", "avx512"], indirect=True)
def test_string_copy_is_the_instruction(processor):
    text = str(copy.emit_string_copy().module)

    check_kernel(text, processor, "string copy", is_vector=True)
    assert re.search(r"rep[\s;]+movsb", assembly(text, processor))


@pytest.mark.soak(quick=1)
def test_conversion_kernels(processor):
    for source, dtype in zip(CONVERTIBLE, (*CONVERTIBLE[1:], CONVERTIBLE[0]), strict=True):
        for scales in (False, True):
            text = str(emit_convert(source, dtype, scales=scales).module)
            check_kernel(text, processor, f"{source} to {dtype}", is_vector=True)
    for source in ("float32", "float16", "bfloat16", "float64"):
        function = emit_add_scaled(source, "float64" if source == "float64" else "float32")
        check_kernel(str(function.module), processor, function.name, is_vector=True)


@pytest.mark.soak(quick=1)
def test_quantisation_kernels(processor):
    for name in WIRE_FORMATS:
        functions = [emit_dequantise(name, divides=divides) for divides in (False, True)]
        if name in FORMATS:
            functions += [emit_quantise(name, by_chance=by_chance) for by_chance in (False, True)]
        for function in functions:
            check_kernel(str(function.module), processor, function.name, is_vector=True)


def test_pack_kernel_calls_by_address_alone(processor):
    code = assembly(str(pack_kernel.emit_pack().module), processor)

    calls = re.findall(r"^\s+(?:callq?|blr?)\s+(.*)$", code, re.MULTILINE)
    assert len(calls) == 1
    assert re.match(r"\*|x\d+$", calls[0])  # no symbol


def test_every_pair_is_known_to_the_kernels():
    table = elements.elements()

    assert {dtype for dtype, _ in ALLOWED} == set(table)
    assert {op for _, op in ALLOWED} == set(OPERATIONS)


# --- Numba's loops ------------------------------------------------------------------------------

LOOPS = (
    ("gpucoll.backends.cpu.host.reductions", "reduction_loop"),
    ("gpucoll.backends.cpu.host.movements", "movement_loop"),
    ("gpucoll.group.host.channel", "exchange_loop"),
    ("gpucoll.transport.shared.flags", "wait_long"),
    ("gpucoll.entries.collective_entry", "collective_entry"),
    ("gpucoll.entries.collectives", "prepared_call"),
    ("gpucoll.entries.messages", "message_entry"),
    ("gpucoll.entries.messages", "take_entry"),
    ("gpucoll.entries.lists", "list_entry"),
    ("gpucoll.entries.objects", "object_entry"),
    ("gpucoll.backends.cpu.host.message_loop", "message_loop"),
)
MAY_CALL = {"syscall", "sched_yield", "sched_getcpu", "poll", "clock_gettime", "memcpy", "memset"}
MAY_CALL |= {"fallocate", "__errno_location", "mremap", "munmap"}
MAY_BEGIN_WITH = ("Py", "_Py", "NRT_", "numba_", "_ZN")
"""CPython, and what Numba wraps around a C function, which depends on its version."""


@pytest.fixture
def arm_loops(arm_code):
    """LLVM IR of the loops as compiled for arm64, by name."""
    return {name: arm_code["entries"][f"{module}.{name}"] for module, name in LOOPS}


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for _, name in LOOPS])
def test_loops_for_arm(arm_loops, name):
    text = arm_loops[name]

    assert "llvm.x86" not in text
    numbers = {"98", "270", "172", "178"}  # futex, process_vm_readv, getpid, gettid
    assert set(re.findall(r"@syscall\(i64 (?:noundef )?(\d+)", text)) <= numbers
    assert f'target triple = "{ARM}"' in text
    code = assembly(text, PROCESSORS["neon"])
    called = set(re.findall(r"^\s+bl\s+(\w+)", code, re.MULTILINE))
    assert not {symbol for symbol in called if not symbol.startswith(MAY_BEGIN_WITH)} - MAY_CALL


@pytest.mark.soak
def test_arm_loops_signal_and_wait_by_futex(arm_loops):
    assert "@syscall(i64 98" in arm_loops["wait_long"]
    assert "llvm.aarch64.hint" in arm_loops["reduction_loop"]
