"""Keeps torch.compile out of communicators.

The compiler runs a function's Python code, and the code it calls, on stand-ins, and stores what it
finds as constants, even the addresses of tensors. A call on a communicator must therefore end one
graph, run unchanged, and begin another. PyTorch's own means for this, ``torch.compiler.disable``,
loads the whole compiler and wraps every call in another function. This module only sets marks.
"""

from __future__ import annotations

import inspect
import sys
from types import CodeType, FunctionType
from typing import Any

_REASON = "a call on a gpucoll communicator cannot be part of a compiled graph"
_codes: list[CodeType] = []
"""Code objects that PyTorch has not been told about yet."""


def keep_out_of(*kinds: type) -> None:
    """Exclude the methods of classes from compilation."""
    for kind in kinds:
        for base in kind.__mro__:
            for method in vars(base).values():
                if isinstance(method, FunctionType):
                    _mark(method)


def _mark(method: FunctionType) -> None:
    function: Any = inspect.unwrap(method)  # the function of a context manager
    both: tuple[Any, Any] = method, function
    for each in both:
        each._torchdynamo_disable, each._torchdynamo_disable_msg = True, _REASON
    _codes.append(function.__code__)


def tell_torch() -> None:
    """Tell PyTorch, if it is loaded. Needed before the first call that its compiler might see."""
    if not _codes or "torch" not in sys.modules:
        return
    frames: Any = getattr(getattr(sys.modules.get("torch._C"), "_dynamo", None), "eval_frame", None)
    strategy = getattr(frames, "_FrameExecStrategy", None)
    if strategy is not None:  # PyTorch 2.7 and newer
        skip = frames._FrameAction.SKIP
        for code in _codes:
            frames.set_code_exec_strategy(code, strategy(skip, skip))
    _codes.clear()
