"""Every kernel compiled for NVIDIA's architectures; what the machine code must have."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kernels.gpu import builds

from gpucoll.kernels.gpu.source import THREADS

try:
    import cuda.bindings.nvrtc  # noqa: F401
except ImportError as error:
    pytest.skip(
        f"no NVRTC ({error}): pip install 'gpucoll[test-gpu]' brings it, no GPU is needed",
        allow_module_level=True,
    )

ROOT = Path(__file__).resolve().parents[3]
ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
REGISTERS = 65536
"""Of a multiprocessor, on all of them."""

each_build = builds.each_build(ARCHITECTURES)


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory):
    """Return ``(architecture, file) -> {"ptx": ..., "log": ...}``."""
    folder = tmp_path_factory.mktemp("cuda")

    def build(architecture: str, file: str) -> dict[str, str]:
        made = folder / f"{architecture}-{file}.json"
        command = [sys.executable, "-m", "tests.kernels.gpu.nvrtc", architecture, file, str(made)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(made.read_text())

    yield from builds.start_builds(request, build)


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
def test_nothing_is_spilled(compiled, architecture, file):
    used = resources(compiled(architecture, file)["log"])
    assert set(used) == builds.names_of(file)
    wrong = {
        name: numbers
        for name, numbers in used.items()
        if numbers[1:] != (0, 0) or 2 * numbers[0] * THREADS > REGISTERS
    }
    assert not wrong, f"(registers, stack, spilled): {wrong}; two blocks must fit"


@each_build
def test_accesses_have_16_bytes(compiled, architecture, file):
    for name, text in entries(compiled(architecture, file)["ptx"]).items():
        accesses = len(re.findall(r"\b(?:ld|st)\.global\.v4\.u32", text))
        # Conversions, and codes of one byte, have them on the wide side only.
        reads = "ld.global.v4.u32" in text or name.startswith(("dequantise", "requantise"))
        assert reads, name
        assert accesses >= 2 or name.startswith("requantise"), f"{name}: {accesses}"
        assert not re.search(r"\b(?:ld|st)\.(?:u|v|b|f)", text), f"{name}: an unknown address space"
        assert ".local" not in text, name


def most_at_once(text: str, width: int) -> int:
    """Return how many loads of a width stand one behind the other, with nothing that needs one."""
    most = count = 0
    for line in text.splitlines():
        words = line.split()
        if words and words[0].startswith(f"ld.global.u{8 * width}"):
            count += 1
            most = max(most, count)
        elif words and not words[0].startswith(("//", "add.s64", "cvt.u64", "shl.b64", "mul.wide")):
            count = 0
    return most


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_enough_is_on_the_way_where_arrays_lie_differently(compiled, dtype, width):
    """16 KB for each multiprocessor, which has two blocks of a reduction and three of a copy."""
    reduces = entries(compiled("sm_90", "reduce.cu")["ptx"])[f"reduce_sum_{dtype}"]
    assert 2 * THREADS * width * most_at_once(reduces, width) >= 16 << 10
    if width == 2:
        copies = entries(compiled("sm_90", "pack.cu")["ptx"])["copy_segments"]
        assert 3 * THREADS * width * most_at_once(copies, width) >= 16 << 10


@each_build
def test_each_operation_is_rounded_by_itself(compiled, architecture, file):
    for name, text in entries(compiled(architecture, file)["ptx"]).items():
        loose = re.findall(
            r"\b(?:fma|(?:add|sub|mul|div)(?!\.rn))[\w.]*\.f(?:32|64)|[\w.]*(?:ftz|approx)[\w.]*",
            text,
        )
        assert not loose, f"{name}: {set(loose)}"


def test_the_processor_converts_where_it_can(compiled):
    def of(architecture: str, name: str) -> str:
        return entries(compiled(architecture, "reduce.cu")["ptx"])[name]

    assert "cvt.rn.bf16.f32" not in of("sm_75", "reduce_sum_bfloat16")
    assert "cvt.rn.satfinite.e4m3x2.f32" not in of("sm_80", "reduce_sum_float8_e4m3fn")
    for architecture in ("sm_90", "sm_100", "sm_120"):
        assert "cvt.rn.bf16.f32" in of(architecture, "reduce_sum_bfloat16")
        assert "cvt.rn.satfinite.e4m3x2.f32" in of(architecture, "reduce_sum_float8_e4m3fn")
        assert "cvt.rn.satfinite.e5m2x2.f32" in of(architecture, "reduce_sum_float8_e5m2")
