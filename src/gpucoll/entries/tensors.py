"""PyTorch tensors in compiled entries: calls of the functions in `gpucoll.arrays.tensor_table`.

Reading a tensor's flags may run other Python threads, or the user's own code (a TorchFunctionMode).
The caller must therefore check again afterwards that the communicator is idle, and must keep
nothing in memory that another thread may use.
"""

from __future__ import annotations

import numpy as np

from gpucoll.arrays.numpy_struct import OBJECT_TYPE
from gpucoll.arrays.tensor_table import CPU, TensorTable, TensorView, key_of
from gpucoll.blocks import Words
from gpucoll.entries.collectives import (
    as_integer,
    call_object,
    clear_error,
    drop_reference,
    new_reference,
)
from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.memory import call_loop, load64, on_stack, signed32

_INT8_KEY, _UINT8_KEY = key_of("int8"), key_of("uint8")
_COMPLEX = 5
"""DLPack's code of all complex dtypes."""

LEAST_ADDRESS = 1 << 40
"""A tensor at a smaller address may have no memory: the address is an offset into no storage."""

_i64 = types.int64
_get_attribute = types.ExternalFunction("PyObject_GetAttr", _i64(_i64, _i64))
_new_tuple = types.ExternalFunction("PyTuple_New", _i64(_i64))
_set_item = types.ExternalFunction("PyTuple_SetItem", types.int32(_i64, _i64, _i64))


@inline
def _call_with(function: int, argument: int) -> int:
    """Call a function with one argument; return a new reference to its result, or 0 if it raised.

    ``PyObject_CallOneArg`` is not used: it is a function of libpython only from Python 3.11 on.
    """
    return call_object(function, on_stack(argument), 1, 0)


@inline
def is_tensor(tensors: TensorTable, x: int) -> bool:
    """Return whether this is a tensor of PyTorch's own class, or a parameter."""
    if not tensors:  # no tensor has come yet
        return False
    kind = load64(x + OBJECT_TYPE)
    return kind == tensors.tensor_type or kind == tensors.parameter_type


@inline
def _is_false(tensors: TensorTable, answer: int) -> bool:
    """Return whether a flag is not set, and release it. An error counts as set."""
    if answer == 0:
        clear_error()
        return False
    drop_reference(answer)
    return answer == tensors.false


@inline
def _has_dtype(tensors: TensorTable, x: int, dtype: int) -> bool:
    """Return whether a tensor's dtype is this object."""
    found = _get_attribute(x, tensors.dtype)
    if found == 0:
        clear_error()
        return False
    drop_reference(found)
    return found == dtype


@inline
def is_plain(tensors: TensorTable, x: int, key: int) -> bool:
    """Return whether a tensor, with this key of its dtype, has its elements in its memory."""
    if not _is_false(tensors, _call_with(tensors.is_neg, x)):
        return False
    if key == _INT8_KEY:
        return _has_dtype(tensors, x, tensors.int8)
    if key == _UINT8_KEY:
        return _has_dtype(tensors, x, tensors.uint8)
    if -key & 0xFF == _COMPLEX:
        return _is_false(tensors, _call_with(tensors.is_conj, x))
    return True


@inline
def may_be_written(tensors: TensorTable, x: int) -> bool:
    """Return whether autograd allows a tensor to be written."""
    return _is_false(tensors, _get_attribute(x, tensors.requires_grad))


@inline
def counts_versions(tensors: TensorTable, x: int) -> bool:
    """Return whether autograd must be told of writes: not for tensors of inference mode."""
    return _is_false(tensors, _call_with(tensors.is_inference, x))


@inline
def _has_memory(tensors: TensorTable, x: int, address: int, item_bytes: int) -> bool:
    """Return whether a tensor's elements have memory."""
    if address >= LEAST_ADDRESS:
        return True
    if address == 0:
        return False
    offset = _call_with(tensors.storage_offset, x)
    if offset == 0:
        clear_error()
        return False
    elements = as_integer(offset)
    drop_reference(offset)
    return address != elements * item_bytes


@inline
def _count_contiguous(view: TensorView) -> int:
    """Return the number of elements if they are in C order without gaps; otherwise -1."""
    shape, strides = view.shape, view.strides
    count, lies_so = 1, True
    for place in range(number_of_dimensions(view)):
        axis = number_of_dimensions(view) - 1 - place
        length = shape[axis]
        if length != 1 and strides and strides[axis] != count:
            lies_so = False
        count *= length
    return count if lies_so or count == 0 else -1


@inline
def number_of_dimensions(view: TensorView) -> int:
    """Return the number of a tensor's dimensions."""
    return signed32(view.n_dimensions)


@inline
def key_of_dtype(view: TensorView) -> int:
    """Return the key of a tensor's dtype: see `gpucoll.arrays.tensor_table.key_of`."""
    return -(view.n_dimensions >> 32)


@inline
def address_of(view: TensorView) -> int:
    """Return a tensor's address."""
    return view.data + view.byte_offset


@inline
def shape_of(view: TensorView) -> Words:
    """Return a tensor's shape."""
    return view.shape


@inline
def read_view(tensors: TensorTable, x: int, view: TensorView) -> int:
    """Fill in a contiguous tensor's view; return its number of elements, or -1 if it has none."""
    if np.int32(call_loop(tensors.read, x, view)) != 0:
        clear_error()  # a tensor without memory, or of a kind that DLPack does not support
        return -1
    if np.int32(view.device) != CPU:
        return -1
    return _count_contiguous(view)


@inline
def has_memory(tensors: TensorTable, x: int, view: TensorView, count: int) -> bool:
    """Return whether a tensor with this view and count has memory. Other threads may run."""
    if count == 0:
        return True
    return _has_memory(tensors, x, address_of(view), view.n_dimensions >> 43 & 31)


@inline
def new_like(tensors: TensorTable, x: int) -> int:
    """Return a new reference to a new tensor like x, or 0 if PyTorch makes none."""
    made = _call_with(tensors.empty_like, x)
    if made == 0:
        clear_error()
    return made


@inline
def note_written(tensors: TensorTable, xs: int) -> bool:
    """Tell autograd that tensors were written; return whether this succeeded."""
    done = _call_with(tensors.increment, xs)
    if done == 0:
        return False
    drop_reference(done)
    return True


@inline
def note_one_written(tensors: TensorTable, x: int) -> int:
    """Tell autograd that one tensor was written; return whether this succeeded."""
    xs = _new_tuple(1)
    if xs == 0:
        return False
    new_reference(x)
    _set_item(xs, 0, x)  # takes the reference
    went_well = note_written(tensors, xs)
    drop_reference(xs)
    return went_well
