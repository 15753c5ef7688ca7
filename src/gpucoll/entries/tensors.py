"""PyTorch tensors in compiled entries: what `gpucoll.arrays.tensor_table` leads to, called.

What asks for a tensor's flags may let other Python threads run, or the user's own code (a
TorchFunctionMode). So whoever has asked looks again whether the communicator is idle, and keeps
nothing in memory that such a thread may use, too.
"""

from __future__ import annotations

import numpy as np

from gpucoll.arrays.numpy_struct import OBJECT_TYPE
from gpucoll.arrays.tensor_table import CPU, View, Word, key_of
from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.memory import call_loop, get, load64, on_stack

_TENSOR_TYPE, _PARAMETER_TYPE = int(Word.TENSOR_TYPE), int(Word.PARAMETER_TYPE)
_READ, _FALSE, _INCREMENT = int(Word.READ), int(Word.FALSE), int(Word.INCREMENT)
_IS_NEG, _IS_CONJ, _IS_INFERENCE = int(Word.IS_NEG), int(Word.IS_CONJ), int(Word.IS_INFERENCE)
_DTYPE, _REQUIRES_GRAD = int(Word.DTYPE), int(Word.REQUIRES_GRAD)
_EMPTY_LIKE = int(Word.EMPTY_LIKE)
_STORAGE_OFFSET, _INT8, _UINT8 = int(Word.STORAGE_OFFSET), int(Word.INT8), int(Word.UINT8)
_DATA, _DEVICE, _N_DIMENSIONS = int(View.DATA), int(View.DEVICE), int(View.N_DIMENSIONS)
_SHAPE, _STRIDES, _BYTE_OFFSET = int(View.SHAPE), int(View.STRIDES), int(View.BYTE_OFFSET)
_INT8_KEY, _UINT8_KEY = key_of("int8"), key_of("uint8")
_COMPLEX = 5
"""DLPack's code of all complex dtypes."""

LEAST_ADDRESS = 1 << 40
"""Below may be a tensor without memory: its address is the offset into a storage of none."""

_i64 = types.int64
_get_attribute = types.ExternalFunction("PyObject_GetAttr", _i64(_i64, _i64))
_call = types.ExternalFunction("PyObject_VectorcallDict", _i64(_i64, _i64, _i64, _i64))
_as_integer = types.ExternalFunction("PyLong_AsLongLong", _i64(_i64))
_new_tuple = types.ExternalFunction("PyTuple_New", _i64(_i64))
_set_item = types.ExternalFunction("PyTuple_SetItem", types.int32(_i64, _i64, _i64))
_clear_error = types.ExternalFunction("PyErr_Clear", types.void())
_increase_reference = types.ExternalFunction("Py_IncRef", types.void(_i64))
drop_reference = types.ExternalFunction("Py_DecRef", types.void(_i64))


@inline
def _call_with(function, argument):
    """Return what a function returns of one argument: a new reference; 0 where it raised.

    Not by ``PyObject_CallOneArg``, which is a function of libpython only from Python 3.11 on.
    """
    return _call(function, on_stack(argument), 1, 0)


@inline
def is_tensor(tensors, x):
    """Return whether this is a tensor of PyTorch's own class, or a parameter."""
    if tensors == 0:  # none has come yet
        return False
    kind = load64(x + OBJECT_TYPE)
    return kind == get(tensors, _TENSOR_TYPE) or kind == get(tensors, _PARAMETER_TYPE)


@inline
def _is_false(tensors, answer):
    """Return whether a flag is not set, and let go of it; an error counts as set."""
    if answer == 0:
        _clear_error()
        return False
    drop_reference(answer)
    return answer == get(tensors, _FALSE)


@inline
def _has_dtype(tensors, x, dtype):
    """Return whether a tensor's dtype is this object."""
    found = _get_attribute(x, get(tensors, _DTYPE))
    if found == 0:
        _clear_error()
        return False
    drop_reference(found)
    return found == dtype


@inline
def is_plain(tensors, x, key):
    """Return whether the memory of a tensor, whose dtype's key this is, is its elements."""
    if not _is_false(tensors, _call_with(get(tensors, _IS_NEG), x)):
        return False
    if key == _INT8_KEY:
        return _has_dtype(tensors, x, get(tensors, _INT8))
    if key == _UINT8_KEY:
        return _has_dtype(tensors, x, get(tensors, _UINT8))
    if -key & 0xFF == _COMPLEX:
        return _is_false(tensors, _call_with(get(tensors, _IS_CONJ), x))
    return True


@inline
def may_be_written(tensors, x):
    """Return whether autograd has nothing against a tensor being written."""
    return _is_false(tensors, _get_attribute(x, get(tensors, _REQUIRES_GRAD)))


@inline
def counts_versions(tensors, x):
    """Return whether autograd is to be told when a tensor is written: not of inference mode."""
    return _is_false(tensors, _call_with(get(tensors, _IS_INFERENCE), x))


@inline
def _has_memory(tensors, x, address, item_bytes):
    """Return whether the elements of a tensor are anywhere."""
    if address >= LEAST_ADDRESS:
        return True
    if address == 0:
        return False
    offset = _call_with(get(tensors, _STORAGE_OFFSET), x)
    if offset == 0:
        _clear_error()
        return False
    elements = _as_integer(offset)
    drop_reference(offset)
    return address != elements * item_bytes


@inline
def _count_contiguous(view):
    """Return how many elements lie in C order without gaps; -1 where they do not."""
    shape, strides = get(view, _SHAPE), get(view, _STRIDES)
    count, lies_so = 1, True
    for place in range(number_of_dimensions(view)):
        axis = number_of_dimensions(view) - 1 - place
        length = get(shape, axis)
        if length != 1 and strides != 0 and get(strides, axis) != count:
            lies_so = False
        count *= length
    return count if lies_so or count == 0 else -1


@inline
def number_of_dimensions(view):
    """Return how many dimensions a tensor has."""
    return np.int64(np.int32(get(view, _N_DIMENSIONS)))


@inline
def key_of_dtype(view):
    """Return what entries know a tensor's dtype by: `gpucoll.arrays.tensor_table.key_of`."""
    return -(get(view, _N_DIMENSIONS) >> 32)


@inline
def address_of(view):
    """Return where a tensor lies."""
    return get(view, _DATA) + get(view, _BYTE_OFFSET)


@inline
def shape_of(view):
    """Return the address of a tensor's shape."""
    return get(view, _SHAPE)


@inline
def read_view(tensors, x, view):
    """Fill in a contiguous tensor's view; return its count of elements, -1 where it has no such."""
    if np.int32(call_loop(get(tensors, _READ), x, view)) != 0:
        _clear_error()  # a tensor without memory, or of a kind that DLPack does not know
        return -1
    if np.int32(get(view, _DEVICE)) != CPU:
        return -1
    return _count_contiguous(view)


@inline
def has_memory(tensors, x, view, count):
    """Return whether a tensor, whose view and count these are, has memory. Others may run."""
    if count == 0:
        return True
    return _has_memory(tensors, x, address_of(view), get(view, _N_DIMENSIONS) >> 43 & 31)


@inline
def new_like(tensors, x):
    """Return a new tensor like x, a new reference; 0 where PyTorch makes none."""
    made = _call_with(get(tensors, _EMPTY_LIKE), x)
    if made == 0:
        _clear_error()
    return made


@inline
def note_written(tensors, xs):
    """Tell autograd that some tensors were written; return whether that went well."""
    done = _call_with(get(tensors, _INCREMENT), xs)
    if done == 0:
        return False
    drop_reference(done)
    return True


@inline
def note_one_written(tensors, x):
    """Tell autograd that a tensor was written; return whether that went well."""
    xs = _new_tuple(1)
    if xs == 0:
        return False
    _increase_reference(x)
    _set_item(xs, 0, x)  # takes the reference
    went_well = note_written(tensors, xs)
    drop_reference(xs)
    return went_well
