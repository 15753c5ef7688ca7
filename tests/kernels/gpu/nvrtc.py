"""NVRTC, NVIDIA's compiler as a library: it needs neither a GPU nor a driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from gpucoll.kernels.gpu.source import Kernel, source_of

OPTIONS = ("-std=c++17", "--fmad=false")
"""Those of `gpucoll.kernels.gpu.cupy_launcher`, which cannot be imported without CuPy."""


class Compiled(NamedTuple):
    """What NVRTC makes: the log has a paragraph of ptxas for each kernel."""

    ptx: str
    log: str


def compile_for(architecture: str, kernels: list[Kernel]) -> Compiled:
    """Compile kernels of one file to machine code for a real architecture, sm_90."""
    from cuda.bindings import nvrtc

    program = _checked(nvrtc.nvrtcCreateProgram(source_of(kernels).encode(), b"", 0, [], []))
    try:
        options = [*OPTIONS, f"-arch={architecture}", "--ptxas-options=-v"]
        spelled = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(spelled), spelled)
        log = _text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        assert int(status) == 0, log[:4000]
        assert _checked(nvrtc.nvrtcGetCUBINSize(program)) > 0
        return Compiled(_text(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(program: Any, size: Callable[..., Any], get: Callable[..., Any]) -> str:
    data = b" " * _checked(size(program))
    _checked(get(program, data))
    return data.rstrip(b"\0").decode()


def _checked(answer: tuple[Any, ...]) -> Any:
    assert int(answer[0]) == 0, answer
    return answer[1] if len(answer) > 1 else None
