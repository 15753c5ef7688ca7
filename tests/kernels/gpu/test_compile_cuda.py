"""Every kernel compiled for NVIDIA's architectures; what the machine code must have."""

from __future__ import annotations

import functools
import re

import pytest
from tests.kernels.gpu import nvrtc
from tests.kernels.gpu.host import all_kernels

from gpucoll.kernels.gpu.source import THREADS

pytest.importorskip(
    "cuda.bindings.nvrtc",
    reason="no NVRTC: pip install 'gpucoll[test-gpu]' brings it, no GPU is needed",
    exc_type=ImportError,
)

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
FILES = ("reduce.cu", "pack.cu", "quantise.cu")
REGISTERS = 65536
"""Of a multiprocessor, on all of them."""


def kernels_of(file: str):
    return [kernel for kernel in all_kernels() if kernel.file == file]


@functools.cache
def compiled(architecture: str, file: str) -> nvrtc.Compiled:
    return nvrtc.compile_for(architecture, kernels_of(file))


each_build = pytest.mark.parametrize(
    ("architecture", "file"), [(name, file) for name in ARCHITECTURES for file in FILES]
)


def entries(ptx: str) -> dict[str, str]:
    """Return the text of each kernel."""
    parts = re.split(r"^\s*\.visible \.entry (\w+)", ptx, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def resources(log: str) -> dict[str, tuple[int, int, int]]:
    """Return each kernel's registers, bytes of stack and bytes spilled."""
    found = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores"
        r".*?Used (\d+) registers",
        log,
        re.DOTALL,
    )
    return {name: (int(used), int(stack), int(spilled)) for name, stack, spilled, used in found}


@each_build
def test_nothing_is_spilled(architecture, file):
    used = resources(compiled(architecture, file).log)
    assert set(used) == {kernel.name for kernel in kernels_of(file)}
    wrong = {
        name: numbers
        for name, numbers in used.items()
        if numbers[1:] != (0, 0) or 2 * numbers[0] * THREADS > REGISTERS
    }
    assert not wrong, f"(registers, stack, spilled): {wrong}; two blocks must fit"


@each_build
def test_accesses_have_16_bytes(architecture, file):
    for name, text in entries(compiled(architecture, file).ptx).items():
        accesses = len(re.findall(r"\b(?:ld|st)\.global\.v4\.u32", text))
        # Conversions, and codes of one byte, have them on the wide side only.
        reads = "ld.global.v4.u32" in text or name.startswith(("dequantise", "requantise"))
        assert reads, name
        assert accesses >= 2 or name.startswith("requantise"), f"{name}: {accesses}"
        assert not re.search(r"\b(?:ld|st)\.(?:u|v|b|f)", text), f"{name}: an unknown address space"
        assert ".local" not in text, name


@each_build
def test_each_operation_is_rounded_by_itself(architecture, file):
    for name, text in entries(compiled(architecture, file).ptx).items():
        loose = re.findall(
            r"\b(?:fma|(?:add|sub|mul|div)(?!\.rn))[\w.]*\.f(?:32|64)|[\w.]*(?:ftz|approx)[\w.]*",
            text,
        )
        assert not loose, f"{name}: {set(loose)}"


def test_the_processor_converts_where_it_can():
    def of(architecture: str, name: str) -> str:
        return entries(compiled(architecture, "reduce.cu").ptx)[name]

    assert "cvt.rn.bf16.f32" not in of("sm_75", "reduce_sum_bfloat16")
    assert "cvt.rn.satfinite.e4m3x2.f32" not in of("sm_80", "reduce_sum_float8_e4m3fn")
    for architecture in ("sm_90", "sm_100", "sm_120"):
        assert "cvt.rn.bf16.f32" in of(architecture, "reduce_sum_bfloat16")
        assert "cvt.rn.satfinite.e4m3x2.f32" in of(architecture, "reduce_sum_float8_e4m3fn")
        assert "cvt.rn.satfinite.e5m2x2.f32" in of(architecture, "reduce_sum_float8_e5m2")
