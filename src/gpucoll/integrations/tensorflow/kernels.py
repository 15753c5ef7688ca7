"""The ops of gpucoll's collectives, and their kernels."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from types import ModuleType

import tensorflow as tf

from gpucoll.collectives import Collective
from gpucoll.entries.native import Site
from gpucoll.integrations.tensorflow.c_api import Code, OperationError, api
from gpucoll.integrations.tensorflow.call_sites import SERVED, CallSite, site_with
from gpucoll.integrations.tensorflow.compiled.kernels import Functions, Kernel, code_of, kernel_call
from gpucoll.integrations.tensorflow.operations import (
    Call,
    Compiled,
    Node,
    Operation,
    address_of,
    register,
)
from gpucoll.integrations.tensorflow.shapes import Shapes

__all__ = ["LISTED", "OFFERED", "op_name", "registered"]

OFFERED = (
    Collective.ALL_REDUCE,
    Collective.REDUCE,
    Collective.BROADCAST,
    Collective.SCAN,
    Collective.EXCLUSIVE_SCAN,
    Collective.ALL_GATHER,
    Collective.GATHER,
    Collective.REDUCE_SCATTER,
    Collective.SCATTER,
    Collective.ALL_TO_ALL,
)
LISTED = (Collective.ALL_REDUCE, Collective.REDUCE, Collective.BROADCAST)
"""Those that take a list of tensors, in one call."""
_FIRST = 1
"""The first input that is data; the one before is the handle that orders."""


def op_name(collective: Collective, form: str = "") -> str:
    """Return the name of an op, such as GpucollAllReduce.

    Parameters
    ----------
    form : str
        Empty, or "List", or "WithSplits".
    """
    return f"Gpucoll{collective.spelled.title().replace('_', '')}{form}"


@functools.cache
def registered() -> ModuleType:
    """Register the ops, once; return a module with a function for each: ``gpucoll_all_reduce``."""
    served = ", ".join(SERVED)
    one, several = f"T: {{{served}}}", f"T: list({{{served}}}) >= 1"
    x, y = ("order: resource", "x: T"), ("y: T",)
    splits, received = (*x, "splits: int64"), (*y, "received: int64")
    exchange = op_name(Collective.ALL_TO_ALL, "WithSplits")
    barrier = op_name(Collective.BARRIER)
    compiled = Compiled(kernel_call.address, _prepared)
    made = [
        _operation(exchange, _exchange, splits, received, one, _exchanged),
        _operation(barrier, _barrier, x[:1], (), "", _nothing),
    ]
    for each in OFFERED:
        shapes = _rows if each.has_blocks else _same
        made.append(_operation(op_name(each), _run, x, y, one, shapes, compiled))
    for each in LISTED:
        name = op_name(each, "List")
        made.append(_operation(name, _run_list, x, y, several, _same, compiled))
    return register(made)


def _operation(
    name: str,
    run: Callable[[Call, CallSite], None],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    dtypes: str,
    shapes: Callable[[Shapes], None],
    compiled: Compiled | None = None,
) -> Operation:
    def compute(call: Call) -> None:
        site = site_with(call.node.attributes["site"])
        text = site.in_turn(lambda: run(call, site))
        if text:
            said = ctypes.string_at(text)
            code = code_of(int.from_bytes(said[:2], "little"))
            raise OperationError(Code(code), said.decode())

    return Operation(
        name,
        compute,
        inputs,
        outputs,
        [*([dtypes] if dtypes else []), "site: int"],
        shapes,
        ordered=True,
        synchronous=True,
        compiled=compiled,
    )


def _prepared(node: Node, python: int) -> Kernel:
    """Return a new block for a node."""
    site, given = site_with(node.attributes["site"]), node.attributes["T"]
    is_list = not isinstance(given, int)
    dtypes = list(given.type) if is_list else [given]
    kernel = Kernel.new()
    kernel.python, kernel.functions = python, _functions()
    if len(set(dtypes)) == 1:
        dtype = tf.as_dtype(dtypes[0])
        kernel.site = Site(site.native(dtype, is_list=is_list))
        kernel.dtype, kernel.item_bytes = dtypes[0], dtype.size
    kernel.is_list, kernel.count = is_list, len(dtypes)
    kernel.has_blocks, kernel.gets = site.collective.has_blocks, site.gets
    multiply, kernel.divide = site.collective.rows_factor(site.world_size)
    kernel.multiply = multiply if site.gets else 0
    return kernel


@functools.cache
def _functions() -> Functions:
    functions = Functions.new()
    for field, name in (
        ("new_status", "NewStatus"),
        ("delete_status", "DeleteStatus"),
        ("set_status", "SetStatus"),
        ("fail", "OpKernelContext_Failure"),
        ("get_input", "GetInput"),
        ("allocate_output", "AllocateOutput"),
        ("tensor_data", "TensorData"),
        ("n_dims", "NumDims"),
        ("dim", "Dim"),
        ("delete_tensor", "DeleteTensor"),
    ):
        setattr(functions, field, address_of(getattr(api, name)))
    return functions


def _run(call: Call, site: CallSite) -> None:
    (x,) = call.inputs(_FIRST)
    counts = site.counts_of(x)
    y = call.output(0, site.result_shape(x.shape, counts), x.dtype)
    site.run(x, y, counts)


def _run_list(call: Call, site: CallSite) -> None:
    xs = call.inputs(_FIRST)
    site.run_list(xs, [call.output(i, x.shape, x.dtype) for i, x in enumerate(xs)])


def _exchange(call: Call, site: CallSite) -> None:
    x, splits = call.inputs(_FIRST)
    sent = splits.tolist()
    received = site.comm.all_to_all(splits)
    y = call.output(0, (int(received.sum()), *x.shape[1:]), x.dtype)
    site.comm.all_to_all(x, send_counts=sent, recv_counts=received.tolist(), out=y)
    call.give(1, received)


def _barrier(call: Call, site: CallSite) -> None:
    site.comm.barrier()


def _same(shapes: Shapes) -> None:
    for index in range(len(shapes) - _FIRST):
        shapes.keep(index, index + _FIRST)


def _rows(shapes: Shapes) -> None:
    if not shapes.is_scalar(_FIRST):  # of a scalar, which ranks may gather, nothing is said
        shapes.free_rows(0, _FIRST)


def _exchanged(shapes: Shapes) -> None:
    shapes.free_rows(0, _FIRST)
    shapes.keep(1, _FIRST + 1)


def _nothing(shapes: Shapes) -> None:
    """Say nothing: there are no outputs."""
