"""The ops of gpucoll's collectives, and their kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

from gpucoll.collectives import Collective
from gpucoll.integrations.tensorflow.call_sites import (
    SERVED,
    CallSite,
    as_operation_error,
    site_with,
)
from gpucoll.integrations.tensorflow.operations import Call, Operation, register
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
    return register(
        [
            *(
                _operation(op_name(each), _run, x, y, one, _rows if each.has_blocks else _same)
                for each in OFFERED
            ),
            *(
                _operation(op_name(each, "List"), _run_list, x, y, several, _same)
                for each in LISTED
            ),
            _operation(exchange, _exchange, splits, received, one, _exchanged),
            _operation(barrier, _barrier, x[:1], (), "", _nothing),
        ]
    )


def _operation(
    name: str,
    run: Callable[[Call, CallSite], None],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    dtypes: str,
    shapes: Callable[[Shapes], None],
) -> Operation:
    attributes = [*([dtypes] if dtypes else []), "site: int"]
    return Operation(
        name, _kernel(run), inputs, outputs, attributes, shapes, ordered=True, synchronous=True
    )


def _kernel(run: Callable[[Call, CallSite], None]) -> Callable[[Call], None]:
    """Return a kernel that runs a call site; errors of gpucoll are of TensorFlow's classes."""

    def compute(call: Call) -> None:
        try:
            run(call, site_with(call.node.attributes["site"]))
        except Exception as e:
            raise as_operation_error(e) from e

    return compute


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
