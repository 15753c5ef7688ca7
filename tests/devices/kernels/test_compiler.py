"""The vendors' compilers: which copy is used, what is asked of it, and how it says no."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucoll import config
from gpucoll.devices.kernels import compiler
from gpucoll.devices.kernels.compiler import VENDORS, Compiler, compiler_of, kind_of
from gpucoll.errors import BackendError, BackendUnavailableError


def refused(device, _control):
    made = compiler_of(device.kind)
    with pytest.raises(BackendError) as error:
        made.compile("this is no C++", device.target)
    again = made.compile('extern "C" int answer() { return 42; }', device.target)
    return made.path, made.version, str(error.value), again[:4]


def test_what_does_not_compile_is_said_in_the_compilers_words(on_device, double):
    path, version, text, again = on_device(refused)

    vendor = VENDORS[double.kind]
    assert path == str(double.rtc)
    target = "sm_99" if double.kind == "cuda" else "gfx9ff:sramecc+:xnack-"
    assert text.startswith(f"{vendor.name} {version} ({path}) cannot compile kernels for {target}")
    assert f"{vendor.target_option}{target}): NVRTC_ERROR_COMPILATION (code 6): " in text
    assert "error:" in text.partition("(code 6)")[2]  # of g++ or clang++
    assert again == b"\x7fELF"


def failing(device, control):
    made = compiler_of(device.kind)
    control.rtc.double_rtc_set(b"error", 1)
    try:
        with pytest.raises(BackendError, match=r"NVRTC_ERROR_OUT_OF_MEMORY \(code 1\): $"):
            made.compile("int x;", device.target)
    finally:
        control.rtc.double_rtc_set(b"error", 0)


def test_a_compiler_that_fails_without_words(on_device):
    on_device(failing)


@pytest.fixture
def alone(monkeypatch) -> Iterator[None]:
    """No compiler is known from before."""
    for vendor in VENDORS.values():
        monkeypatch.delenv(vendor.variable, raising=False)
    compiler_of.cache_clear()
    yield
    compiler_of.cache_clear()


@pytest.mark.parametrize("kind", ["cuda", "rocm"])
def test_there_is_none(alone, monkeypatch, kind):
    monkeypatch.setattr(compiler, "candidates", lambda *_: ["libgone.so.1", "/nowhere/lib.so"])
    with pytest.raises(BackendUnavailableError) as error:
        compiler_of(kind)
    text = str(error.value)
    vendor = VENDORS[kind]
    assert text.startswith(f"GPU kernels are compiled by {vendor.name}, which cannot be loaded: ")
    assert "libgone.so.1: " in text
    assert "/nowhere/lib.so: " in text
    assert text.endswith(vendor.remedy)
    assert vendor.variable in text
    assert ("pip install nvidia-cuda-nvrtc-cu12" in text) == (kind == "cuda")


@pytest.mark.parametrize("kind", ["cuda", "rocm"])
def test_a_variable_that_names_something_else(alone, monkeypatch, kind):
    vendor = VENDORS[kind]
    monkeypatch.setenv(vendor.variable, "/nowhere/librtc.so")
    start = f"{vendor.name}, which {vendor.variable} names, cannot be used: "
    with pytest.raises(BackendUnavailableError, match=f"{start}/nowhere/librtc.so: cannot open"):
        compiler_of(kind)


def test_a_library_that_is_no_compiler(alone, doubles):
    path = str(doubles.mpi(cuda=0, rocm=0))  # a driver in this process would be a GPU to others
    with pytest.raises(BackendUnavailableError, match=r"is no NVRTC, or too old: no nvrtcVersion"):
        Compiler(VENDORS["cuda"], path)


@pytest.mark.parametrize(
    ("target", "kind"), [("sm_90", "cuda"), ("gfx942:sramecc+:xnack-", "rocm"), ("gfx1100", "rocm")]
)
def test_kinds(target, kind):
    assert kind_of(target) == kind


class Known(Compiler):
    """An NVRTC that knows some architectures."""

    def __init__(self, *numbers: int) -> None:
        self.vendor, self.path, self.version = VENDORS["cuda"], "libnvrtc.so.12", "12.4"
        self.architectures = numbers


def test_a_gpu_that_is_newer_than_the_compiler_gets_text():
    assert Known(75, 80, 90).options("sm_80")[-1] == "--gpu-architecture=sm_80"
    assert Known(75, 80, 90).options("sm_120")[-1] == "--gpu-architecture=compute_90"
    assert Known().options("sm_120")[-1] == "--gpu-architecture=sm_120"
    assert Known(75).options("sm_75")[:-1] == ("-std=c++17", "--fmad=false")
    with pytest.raises(BackendUnavailableError, match="compiles for sm_75 and newer, not for sm_7"):
        Known(75, 80).options("sm_70")


@pytest.fixture
def places(monkeypatch) -> dict[str, list[str]]:
    """What is in the process (by the start of its name), and among wheels."""
    found: dict[str, list[str]] = {"loaded": [], "wheels": []}

    def loaded_copies(pattern: str) -> list[str]:
        stem = pattern.partition("\\")[0]
        return [path for path in found["loaded"] if Path(path).name.startswith(stem)]

    monkeypatch.setattr(compiler, "loaded_copies", loaded_copies)
    monkeypatch.setattr(compiler, "files_of_wheels", lambda patterns: found["wheels"])
    for name in (config.CUDA_PATH, config.CUDA_HOME, config.ROCM_PATH):
        monkeypatch.delenv(name, raising=False)
    return found


def test_where_nvrtc_is_looked_for(places, monkeypatch):
    places["loaded"] = ["/torch/libnvrtc.so.13"]
    places["wheels"] = ["/site/libnvrtc.so.13", "/site/libnvrtc.so.12", "/torch/libnvrtc.so.13"]
    monkeypatch.setenv(config.CUDA_HOME, "/cuda")
    found = compiler.candidates("cuda")
    assert found[:7] == [
        "/torch/libnvrtc.so.13",
        "/site/libnvrtc.so.13",
        "/site/libnvrtc.so.12",
        "/cuda/lib64/libnvrtc.so.13",
        "/cuda/lib64/libnvrtc.so.12",
        "libnvrtc.so.13",
        "libnvrtc.so.12",
    ]
    assert len(set(found)) == len(found)
    for_old_driver = compiler.candidates("cuda", 12)
    assert for_old_driver[:2] == ["/site/libnvrtc.so.12", "/cuda/lib64/libnvrtc.so.12"]
    assert sorted(for_old_driver) == sorted(found)


def test_hiprtc_is_looked_for_beside_the_runtime(places, tmp_path):
    runtime, other = tmp_path / "libamdhip64.so.6", tmp_path / "libhiprtc.so.6"
    runtime.touch()
    other.touch()
    places["loaded"] = [str(runtime)]
    assert compiler.candidates("rocm")[:2] == [str(other), "libhiprtc.so.7"]


def test_copies_that_may_make_different_code_have_different_names(tmp_path, doubles):
    path = doubles.double("nccl").rtc
    if path is None:
        pytest.skip("no C++ compiler for the double of NVRTC")
    longer = tmp_path / "libnvrtc.so.12"
    longer.write_bytes(path.read_bytes() + b"\0")
    first, second = (Compiler(VENDORS["cuda"], str(file)).identity for file in (path, longer))
    assert first != second
    assert first.startswith("nvrtc-12.")
