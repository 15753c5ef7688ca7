"""NVRTC, NVIDIA's compiler as a library: it needs neither a GPU nor a driver.

``python -m tests.kernels.gpu.nvrtc sm_90 reduce.cu OUTPUT`` writes PTX and log as JSON: a process
for each build, since a process compiles one at a time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpucoll.kernels.gpu.catalogue import all_kernels
from gpucoll.kernels.gpu.source import source_of

OPTIONS = ("-std=c++17", "--fmad=false")
"""Those of `gpucoll.devices.kernels.compiler`."""


def compile_for(architecture: str, file: str) -> dict[str, str]:
    """Compile a file's kernels to machine code; the log has a paragraph of ptxas for each."""
    from cuda.bindings import nvrtc

    source = source_of(kernel for kernel in all_kernels() if kernel.file == file)
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"", 0, [], []))
    options = [*OPTIONS, f"-arch={architecture}", "--ptxas-options=-v"]
    spelled = [option.encode() for option in options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(spelled), spelled)
    log = _text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
    assert int(status) == 0, log[:4000]
    assert _checked(nvrtc.nvrtcGetCUBINSize(program)) > 0
    return {"ptx": _text(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX), "log": log}


def _text(program: Any, size: Callable[..., Any], get: Callable[..., Any]) -> str:
    data = b" " * _checked(size(program))
    _checked(get(program, data))
    return data.rstrip(b"\0").decode()


def _checked(answer: tuple[Any, ...]) -> Any:
    assert int(answer[0]) == 0, answer
    return answer[1] if len(answer) > 1 else None


if __name__ == "__main__":
    name, file, output = sys.argv[1:]
    Path(output).write_text(json.dumps(compile_for(name, file)))
