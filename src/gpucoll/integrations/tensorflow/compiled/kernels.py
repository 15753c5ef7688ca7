"""The kernels that TensorFlow and XLA call on CPUs, compiled: they need no interpreter.

They report errors themselves: an interrupt that ended a call would be raised in any function of
Python's that they called for that.
"""

from __future__ import annotations

import numpy as np

from gpucoll.blocks import Block, Field, Words
from gpucoll.entries.native import NativeArray, Site
from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.kernels.cpu.memory import call_words, load32, signed32
from gpucoll.transport.shared.libc import free, malloc, memmove, memset

__all__ = ["Functions", "Kernel", "Place", "PlacedArray", "custom_call", "kernel_call"]

_MOST_DIMENSIONS = 8
_INVALID_ARGUMENT, _DEADLINE_EXCEEDED, _FAILED_PRECONDITION, _ABORTED, _INTERNAL = 3, 4, 9, 10, 13
# The first two letters of an error's text, which begins with its class.
_MISMATCH, _STATE, _DEADLINE, _ARGUMENT, _ABORT, _PEER_LOST = (
    first | second << 8 for first, second in (b"Mi", b"St", b"De", b"Ar", b"Ab", b"Pe")
)
_strlen = types.ExternalFunction("strlen", types.int64(types.int64))
_FIRST = 1
"""The first input that is data: before it comes what orders the calls."""


class Functions(Block):
    """Addresses of functions of TensorFlow's C API."""

    new_status: int
    delete_status: int
    set_status: int
    fail: int
    get_input: int
    allocate_output: int
    tensor_data: int
    n_dims: int
    dim: int
    delete_tensor: int


class Kernel(Block):
    """What TensorFlow keeps for a node of a graph, and passes to its kernel."""

    functions: Field[Functions]
    site: Field[Site]  # 0: Python makes the calls
    python: int  # (kernel, context): makes a call
    is_list: int
    count: int  # of tensors
    dtype: int  # TensorFlow's number
    item_bytes: int
    has_blocks: int  # whether rows of the output are not those of the input, but
    multiply: int  # times this
    divide: int  # by this
    gets: int  # whether the collective writes to the output


class _Pair(Block):
    """An input and its output, while a call runs."""

    array: Field[NativeArray]
    source: int  # TF_Tensor
    destination: int  # TF_Tensor
    output_bytes: int
    dimensions: Field[Words]
    output_dimensions: Field[Words]


_PAIR_WORDS = NativeArray.n_words + _Pair.n_words + 2 * _MOST_DIMENSIONS


@inline
def _call1(function: int, x: int) -> int:
    return call_words(function, x, 0, 0, 0, 0, 0, 0, 0)


@inline
def code_of(letters: int) -> int:
    """Return TensorFlow's code of an error whose text begins with two letters."""
    code = _INTERNAL
    if letters == _MISMATCH or letters == _STATE:
        code = _FAILED_PRECONDITION
    elif letters == _ARGUMENT:  # ArgumentError, ArgumentTypeError
        code = _INVALID_ARGUMENT
    elif letters == _DEADLINE:
        code = _DEADLINE_EXCEEDED
    elif letters == _ABORT or letters == _PEER_LOST:  # UNAVAILABLE would become INTERNAL
        code = _ABORTED
    return code


@inline
def _pair_at(scratch: int, count: int, number: int) -> _Pair:
    """Return a pair in the memory of a call: first all arrays, as a list needs them."""
    rest = scratch + count * NativeArray.n_bytes
    pair = _Pair(rest + number * (_Pair.n_bytes + 16 * _MOST_DIMENSIONS))
    pair.array = NativeArray(scratch + number * NativeArray.n_bytes)
    pair.dimensions = Words(pair.at.array + _Pair.n_bytes)
    pair.output_dimensions = Words(pair.at.array + _Pair.n_bytes + 8 * _MOST_DIMENSIONS)
    return pair


@inline
def _read(kernel: Kernel, context: int, status: int, pair: _Pair, number: int) -> int:
    """Look at an input; return whether compiled code can take it."""
    functions = kernel.functions
    pair.source = 0
    pair.destination = 0
    call_words(functions.get_input, context, number + _FIRST, pair.at.source, status, 0, 0, 0, 0)
    if pair.source == 0:
        return 0
    n_dimensions = signed32(_call1(functions.n_dims, pair.source))
    if n_dimensions > _MOST_DIMENSIONS:
        return 0
    if kernel.has_blocks != 0 and n_dimensions == 0:
        return 0
    count = 1
    for axis in range(n_dimensions):
        size = call_words(functions.dim, pair.source, axis, 0, 0, 0, 0, 0, 0)
        pair.dimensions[axis] = size
        if axis == 0 and kernel.has_blocks != 0:
            if size % kernel.divide != 0:
                return 0
            size = size * kernel.multiply // kernel.divide
        pair.output_dimensions[axis] = size
        count *= size
    pair.output_bytes = count * kernel.item_bytes
    array = pair.array
    array.source = _call1(functions.tensor_data, pair.source)
    array.n_dimensions = n_dimensions
    array.dimensions = pair.dimensions
    return 1


@inline
def _allocate(kernel: Kernel, context: int, status: int, pair: _Pair, number: int) -> int:
    """Make an output; return whether there was memory for it."""
    functions, array = kernel.functions, pair.array
    pair.destination = call_words(
        functions.allocate_output,
        context,
        number,
        kernel.dtype,
        pair.output_dimensions,
        array.n_dimensions,
        pair.output_bytes,
        status,
        0,
    )
    if pair.destination == 0:
        return 0
    array.destination = _call1(functions.tensor_data, pair.destination)
    return 1


@inline
def _run(site: Site, arrays: NativeArray, count: int, is_list: int) -> int:
    """Make the call; return 0, or the address of an error's text."""
    if is_list != 0:
        return call_words(site.run_list, site, arrays, count, 0, 0, 0, 0, 0)
    return call_words(
        site.run,
        site,
        arrays.source,
        arrays.destination,
        arrays.n_dimensions,
        arrays.dimensions,
        0,
        0,
        0,
    )


@compiled_when_used()
def kernel_call(kernel: Kernel, context: int) -> int:
    """Run a node of a graph: the function that TensorFlow calls.

    Parameters
    ----------
    kernel : Kernel
        The node.
    context : int
        The TF_OpKernelContext.

    Returns
    -------
    int
        Nothing that counts.
    """
    functions, count, text = kernel.functions, kernel.count, 0
    is_served = 0
    if kernel.site:
        is_served = 1
        scratch = malloc(count * 8 * _PAIR_WORDS)
        status = _call1(functions.new_status, 0)
        for number in range(count):
            is_served &= _read(kernel, context, status, _pair_at(scratch, count, number), number)
        if is_served != 0:
            for number in range(count):
                pair = _pair_at(scratch, count, number)
                is_served &= _allocate(kernel, context, status, pair, number)
        if is_served != 0:
            text = _run(kernel.site, NativeArray(scratch), count, kernel.is_list)
            if kernel.gets == 0:
                pair = _pair_at(scratch, count, 0)
                memset(pair.array.destination, np.int32(0), pair.output_bytes)
        for number in range(count):
            pair = _pair_at(scratch, count, number)
            if pair.source != 0:
                _call1(functions.delete_tensor, pair.source)
            if pair.destination != 0:
                _call1(functions.delete_tensor, pair.destination)
        _call1(functions.delete_status, status)
        free(scratch)
    if is_served == 0:
        call_words(kernel.python, kernel, context, 0, 0, 0, 0, 0, 0)
    if text != 0:
        status = _call1(functions.new_status, 0)
        call_words(
            functions.set_status, status, code_of(load32(text) & 0xFFFF), text, 0, 0, 0, 0, 0
        )
        call_words(functions.fail, context, status, 0, 0, 0, 0, 0, 0)
        _call1(functions.delete_status, status)
    return 0


class Failure(Block):
    """An XlaCustomCallStatus: an optional std::string of libstdc++."""

    text: int
    length: int
    capacity: int
    unused: int
    is_set: int  # a byte, and seven that nobody reads


@inline
def _report(failure: Failure, text: int) -> None:
    """Write an error as C++ does: XLA frees the text."""
    length = _strlen(text)
    failure.text = malloc(length + 1)
    memmove(failure.text, text, length + 1)
    failure.length = length
    failure.capacity = length
    failure.is_set = 1


class PlacedArray(Block):
    """The shape of an input of a custom call."""

    n_dimensions: int
    dimensions: Field[Words]


class Place(Block):
    """A custom call in a program of XLA's, which passes addresses and no more."""

    site: Field[Site]  # 0: Python makes the calls
    python: int  # (outputs, inputs): makes a call; returns 0 or an error's text
    is_list: int
    count: int  # of arrays
    arrays: Field[PlacedArray]
    zero_bytes: int  # of the output, if the collective does not write to it


@inline
def _place_in(text: Words) -> Place:
    """Return the place whose address a text spells: four bits in each of 16 letters."""
    address = 0
    for number in range(16):
        letter = text[number // 8] >> (number % 8 * 8)
        address |= (letter & 15) << (4 * number)
    return Place(address)


@compiled_when_used()
def custom_call(outputs: Words, inputs: Words, text: Words, length: int, status: Failure) -> int:
    """Run a custom call: the function that XLA calls.

    Parameters
    ----------
    outputs, inputs : Words
        The addresses of the arrays. The first of both is a token of 4 bytes.
    text, length
        The address of the `Place`, spelled.
    status : Failure
        Where an error goes.

    Returns
    -------
    int
        Nothing that counts.
    """
    place = _place_in(text)
    if not place.site:
        error = call_words(place.python, outputs, inputs, 0, 0, 0, 0, 0, 0)
        if error != 0:
            _report(status, error)
        return 0
    count = place.count
    scratch = malloc(count * NativeArray.n_bytes)
    for number in range(count):
        array, given = NativeArray(scratch)[number], place.arrays[number]
        array.source = inputs[number + 1]
        array.destination = outputs[number + 1]
        array.n_dimensions = given.n_dimensions
        array.dimensions = given.dimensions
    memmove(outputs[0], inputs[0], 4)
    error = _run(place.site, NativeArray(scratch), count, place.is_list)
    memset(outputs[1], np.int32(0), place.zero_bytes)
    free(scratch)
    if error != 0:
        _report(status, error)
    return 0
