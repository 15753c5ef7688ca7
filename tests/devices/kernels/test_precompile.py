"""Compiling all kernels ahead: by the doubles, and by the real NVRTC where its wheel is."""

from __future__ import annotations

import re

import pytest
from tests.doubles import run_python

from gpucoll import config
from gpucoll.devices.foreign_library import files_of_wheels
from gpucoll.devices.kernels import compiler, precompile


def run(arguments: list[str], **variables: str) -> str:
    """Run the command in a process of its own; return what it says, and its exit code."""
    return run_python(
        "import subprocess, sys\n"
        f"done = subprocess.run([sys.executable, '-m', {precompile.__name__!r}, *{arguments!r}],"
        " capture_output=True, text=True, timeout=110)\n"
        "print(done.returncode, done.stdout, done.stderr)",
        **variables,
    )


def test_targets_and_words(tmp_path):
    variables = {config.CACHE_DIR: str(tmp_path), config.CPU_ONLY: "1"}
    assert "sm_90 or gfx942" in run(["--targets", "hopper"], **variables)
    said = run([], **variables)
    assert said.startswith("2 ")
    assert "there is no GPU here: say what to compile for, by --targets" in said


def test_a_compiler_that_is_not_there(tmp_path):
    variables = {config.CACHE_DIR: str(tmp_path), config.HIPRTC_LIBRARY: "/nowhere/lib.so"}
    said = run(["--targets", "gfx942,gfx90a"], **variables)
    assert said.startswith("1 gfx942: failed: hipRTC, which GPUCOLL_HIPRTC_LIBRARY names, cannot ")
    assert "\ngfx90a: failed: " in said
    assert not list((tmp_path / "gpu-kernels").iterdir())


def test_a_folder_that_cannot_serve(tmp_path):
    tmp_path.chmod(0o777)
    said = run(["--targets", "sm_90"], **{config.CACHE_DIR: str(tmp_path)})
    assert said.startswith("1 ")
    assert "can be written to by other users" in said


@pytest.mark.soak
def test_by_the_double(doubles, tmp_path):
    """All of them, as host code; from then on nothing is compiled."""
    double = doubles.double("rccl")
    if double.rtc is None:
        pytest.skip("no C++ compiler (g++, clang++) for the double of the kernels' compiler")
    variables = {**double.variables, config.CACHE_DIR: str(tmp_path)}
    said = run(["--targets", "gfx9ff:xnack-"], **variables)
    assert re.match(r"0 gfx9ff:xnack-: 14\d kernels, \d+\.\d MB, by hipRTC 6\.\d+ ", said), said
    names = {path.name.partition("-")[0] for path in (tmp_path / "gpu-kernels").iterdir()}
    assert names == {"reduce", "pack", "quantise"}


REAL = """
import sys
from gpucoll.devices.kernels.compiler import compiler_of
from gpucoll.devices.kernels.images import compile_group, image_of
from gpucoll.errors import BackendError
from gpucoll.kernels.gpu.catalogue import all_kernels, groups

compiler = compiler_of("cuda")
print(compiler)
for target in sys.argv[1:] or ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120"):
    for kernel in all_kernels()[::40]:
        assert image_of(kernel, target).content.startswith(b"\\x7fELF"), (kernel, target)
    assert compile_group(groups()[-1], target).content.startswith(b"\\x7fELF")
assert compiler._architecture("sm_999").startswith("compute_")
text = compiler.compile('extern "C" __global__ void f() {}', "sm_999")
assert b".visible .entry f" in text and text.endswith(b"\\0"), text
try:
    compiler.compile("nonsense", "sm_90")
except BackendError as error:
    print(error)
"""


def test_by_the_real_nvrtc(tmp_path):
    wheels = [*files_of_wheels(compiler._WHEELS["cuda"])]
    if not wheels:
        pytest.skip("no wheel of NVRTC: pip install nvidia-cuda-nvrtc-cu12, no GPU is needed")
    for path in wheels:
        variables = {config.NVRTC_LIBRARY: path, config.CACHE_DIR: str(tmp_path)}
        said = run_python(REAL, **variables)
        assert re.match(rf"NVRTC 1\d\.\d+ \({re.escape(path)}\)\n", said)
        assert "NVRTC_ERROR_COMPILATION" in said
        assert "gpucoll(1): error: " in said


def test_its_targets_are_those_of_the_docs(pytestconfig):
    text = (pytestconfig.rootpath / "docs/gpu_kernels.md").read_text("utf-8")
    for target in precompile.TARGETS:
        assert target in text or target.replace("sm_", "") in text, target
