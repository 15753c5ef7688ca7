"""Every kernel compiled for AMD's architectures, offline; what the machine code must have."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.kernels.gpu import builds
from tests.kernels.gpu.host import all_kernels

from gpucoll.kernels.gpu.source import source_of

CLANG = shutil.which("clang++-19") or shutil.which("clang-19")
pytestmark = pytest.mark.skipif(
    CLANG is None,
    reason="no clang-19, which compiles for AMD GPUs without ROCm: apt-get install clang-19",
)

ARCHITECTURES = ("gfx90a", "gfx942", "gfx1100")
OPTIONS = (
    *("-x", "hip", "--cuda-device-only", "-nogpulib", "-nogpuinc", "--no-gpu-bundle-output"),
    *("-std=c++17", "-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-S"),
    *(
        "-Wno-unused-command-line-argument",
        "-Wno-unused-function",
        "-Rpass-analysis=kernel-resource-usage",
    ),
)


class Compiled(NamedTuple):
    """Assembly, and the compiler's remarks on resources."""

    assembly: str
    remarks: str


each_build = builds.each_build(ARCHITECTURES)


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory):
    """Return ``(architecture, file) -> Compiled``."""
    folder: Path = tmp_path_factory.mktemp("amd")

    def build(architecture: str, file: str) -> Compiled:
        source, made = folder / f"{architecture}-{file}", folder / f"{architecture}-{file}.s"
        source.write_text(source_of(kernel for kernel in all_kernels() if kernel.file == file))
        command = [str(CLANG), *OPTIONS, f"--offload-arch={architecture}", str(source)]
        command += ["-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        return Compiled(made.read_text(), done.stderr)

    yield from builds.start_builds(request, build)


@each_build
def test_nothing_is_spilled(compiled, architecture, file):
    remarks = compiled(architecture, file).remarks
    found = re.findall(
        r"Function Name: (\w+).*?ScratchSize \[bytes/lane\]: (\d+).*?VGPRs Spill: (\d+)",
        remarks,
        re.DOTALL,
    )
    assert {name for name, *_ in found} == builds.names_of(file)
    assert not [each for each in found if each[1:] != ("0", "0")]


@each_build
def test_accesses_have_16_bytes(compiled, architecture, file):
    assembly = compiled(architecture, file).assembly
    parts = re.split(r"^(\w+):\s*; @\1$", assembly, flags=re.MULTILINE)[1:]
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        kind = "store" if name.startswith("dequantise") else "load"
        if not name.startswith("requantise"):  # it reads and writes codes only
            assert re.search(rf"global_{kind}_(?:dwordx4|b128)", text), name
        assert not re.search(r"\b(?:flat|scratch|buffer)_(?:load|store)", text), name


@each_build
def test_each_operation_is_rounded_by_itself(compiled, architecture, file):
    """Divisions are made of fused operations; nothing else may be."""
    assembly = compiled(architecture, file).assembly
    parts = re.split(r"^(\w+):\s*; @\1$", assembly, flags=re.MULTILINE)[1:]
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        divides = "_avg_" in name or "quantise" in name
        fused = re.findall(r"\bv_(?:pk_)?(?:fma|fmac|mad|mac|fma_mix\w*)_f\w+", text)
        assert divides or not fused, f"{name}: {set(fused)}"
