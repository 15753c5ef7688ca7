"""Keeps torch.compile out of communicators.

It runs a function's Python code on stand-ins, and the code of what that calls, and keeps what it
finds as constants: where tensors lie, too. A call on a communicator is to end one graph, to be made
as it stands, and to begin another. PyTorch's own way to ask for that, ``torch.compiler.disable``,
loads its whole compiler and puts another function around each call; this marks what is there.
"""

from __future__ import annotations

import inspect
import sys
from types import CodeType, FunctionType
from typing import Any

_REASON = "a call on a gpucoll communicator cannot be part of a compiled graph"
_codes: list[CodeType] = []
"""Of what PyTorch has not been told yet."""


def keep_out_of(*kinds: type) -> None:
    """Have the methods of classes run as they stand, whoever calls them."""
    for kind in kinds:
        for base in kind.__mro__:
            for method in vars(base).values():
                if isinstance(method, FunctionType):
                    _mark(method)


def _mark(method: Any) -> None:
    function: Any = inspect.unwrap(method)  # of a context manager
    for each in (method, function):
        each._torchdynamo_disable, each._torchdynamo_disable_msg = True, _REASON
    _codes.append(function.__code__)


def tell_torch() -> None:
    """Tell PyTorch, if it is loaded; before the first call that its compiler might see."""
    if not _codes or "torch" not in sys.modules:
        return
    frames: Any = getattr(getattr(sys.modules.get("torch._C"), "_dynamo", None), "eval_frame", None)
    strategy = getattr(frames, "_FrameExecStrategy", None)
    if strategy is not None:  # PyTorch 2.7 and newer
        skip = frames._FrameAction.SKIP
        for code in _codes:
            frames.set_code_exec_strategy(code, strategy(skip, skip))
    _codes.clear()
