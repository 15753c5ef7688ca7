"""Arrays that compiled entries read by themselves: NumPy's, and PyTorch's on the host."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpucoll.arrays import tensor_table
from gpucoll.arrays.library import AnyArray, Template

if TYPE_CHECKING:
    import torch


class ArrayKind(NamedTuple):
    """Arrays of one dtype of one library.

    Attributes
    ----------
    native : object
        The library's dtype object.
    key : int
        Its key in entries: its identity, or for tensors `gpucoll.arrays.tensor_table.key_of`.
    dtype, item_bytes
        As in `Template`.
    tensor_table : int
        Address of the table with which entries read them (`gpucoll.arrays.tensor_table`); 0 for
        NumPy's.
    """

    native: Any
    key: int
    dtype: str
    item_bytes: int
    tensor_table: int = 0


_makers: dict[type, Callable[[Any], Any]] = {}
"""Types of tensors that entries read -> a function that makes a new one like it."""


def kind_of_array(x: AnyArray, template: Template) -> ArrayKind | None:
    """Return the kind of x, which has this template; None if entries cannot read x."""
    name, item_bytes = template.dtype, template.item_bytes
    if type(x) is np.ndarray:
        return ArrayKind(x.dtype, id(x.dtype), name, item_bytes)
    torch: Any = sys.modules.get("torch")
    if torch is None or type(x) not in (torch.Tensor, torch.nn.Parameter) or not x.is_cpu:
        return None
    key, table = tensor_table.key_of(name), tensor_table.table()
    if key == 0 or table is None:
        return None
    _makers[type(x)] = torch.empty_like
    return ArrayKind(x.dtype, key, name, item_bytes, table.ctypes.data)


def numpy_view(x: AnyArray) -> npt.NDArray[np.generic] | None:
    """Return a plain PyTorch tensor on the host as a NumPy array; None for anything else.

    None, too, if NumPy cannot show it: bfloat16, lazy conjugates, and where autograd follows it.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or type(x) is not getattr(torch, "Tensor", None) or not x.is_cpu:
        return None
    try:
        plain = x.detach() if x.requires_grad and not torch.is_grad_enabled() else x
        shown: npt.NDArray[np.generic] = plain.numpy()
    except (TypeError, RuntimeError):
        return None
    return shown


def note_written(out: torch.Tensor) -> None:
    """Tell autograd that a tensor was written."""
    if not out.is_inference():
        torch: Any = sys.modules["torch"]
        torch.autograd.graph.increment_version(out)


def new_like(x: AnyArray) -> torch.Tensor | None:
    """Return a new tensor like x, if entries read x's type; None for anything else.

    None, too, if PyTorch cannot make the tensor: the call then goes through Python, which says why.
    """
    make = _makers.get(type(x))
    if make is None or not x.is_cpu:
        return None
    try:
        return make(x)
    except RuntimeError:
        return None


def new_of_rows(x: AnyArray, multiply: int, divide: int) -> torch.Tensor | None:
    """Return a new tensor with ``multiply / divide`` times x's rows; None as in `new_like`."""
    if type(x) not in _makers or not x.is_cpu:
        return None
    try:
        shape = x.shape
        return x.new_empty((shape[0] * multiply // divide, *shape[1:])) if shape else None
    except RuntimeError:
        return None
