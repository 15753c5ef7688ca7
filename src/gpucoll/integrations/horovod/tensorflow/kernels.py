"""Horovod's ops: each is a request to the engine, named after its node of the graph."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from gpucoll import ArgumentError, ArgumentTypeError
from gpucoll.integrations.horovod import basics, process_sets
from gpucoll.integrations.horovod.arguments import root_of, rows_for_each
from gpucoll.integrations.horovod.engine.numpy_arrays import NumpyArrays
from gpucoll.integrations.horovod.engine.request import Kind, ReduceOp, Request
from gpucoll.integrations.horovod.exceptions import HorovodInternalError
from gpucoll.integrations.tensorflow.c_api import Code, OperationError
from gpucoll.integrations.tensorflow.operations import Call, Node, Operation, register
from gpucoll.integrations.tensorflow.shapes import Shapes

if TYPE_CHECKING:
    from gpucoll.integrations.horovod.engine.engine import Engine

__all__ = ["registered"]

_ARRAYS = NumpyArrays()
_REDUCED = "T: {uint8, int8, int32, int64, bfloat16, float16, float32, float64}"
_SCATTERED = "T: {int32, int64, bfloat16, float16, float32, float64}"
_MOVED = "T: {uint8, int8, uint16, int16, int32, int64, bfloat16, float16, float32, float64, bool}"
_NAMED = ("ignore_name_scope: bool = False", "process_set_id: int = 0")
_FACTORS = ("reduce_op: int", "prescale_factor: float = 1", "postscale_factor: float = 1")


def _scattered(shapes: Shapes) -> None:
    for index in range(len(shapes)):
        if shapes.is_scalar(index):
            raise OperationError(
                Code.INVALID_ARGUMENT, "HorovodReducescatter does not support scalar inputs."
            )
    shapes.rows()


def _exchanged(shapes: Shapes) -> None:
    shapes.free_rows(0)
    shapes.keep(1)


def _set_id(node: Node) -> int:
    return int(node.attributes.get("process_set_id", 0))


def _collective(compute: Callable[[Call, Engine], None]) -> Callable[[Call], None]:
    """Return the computation of an op, with errors of the classes that programs expect."""

    def computed(call: Call) -> None:
        if not basics.is_initialized():
            raise OperationError(
                Code.FAILED_PRECONDITION, "Horovod has not been initialized; use hvd.init()."
            )
        try:
            compute(call, basics.engine_of(_set_id(call.node)))
        except ValueError as e:  # a bad argument, or the same name twice
            raise OperationError(Code.INVALID_ARGUMENT, str(e)) from e
        except HorovodInternalError as e:
            raise _as_tensorflow(e) from e

    return computed


def _request(call: Call, kind: Kind, arrays: list[Any], **fields: Any) -> Request:
    """Return a request, named after the node."""
    name, attributes = call.node.name, call.node.attributes
    if attributes["ignore_name_scope"]:
        name = name.rpartition("/")[2]
    if "reduce_op" in attributes:
        fields["op"] = ReduceOp(attributes["reduce_op"])
        fields["prescale"] = attributes["prescale_factor"]
        fields["postscale"] = attributes["postscale_factor"]
    return Request(kind, name, _ARRAYS, arrays, **fields)


def _run(
    call: Call, engine: Engine, request: Request, end: Callable[[Request], None] | None = None
) -> None:
    """Have a request done: at once if the program waits for it, else by the engine's thread.

    Parameters
    ----------
    end : callable, optional
        Copies the results to the op's outputs.
    """

    def finished(request: Request) -> None:
        error = request.error
        try:
            if error is None and end is not None:
                end(request)
        except Exception as e:
            error = e
        call.finish(None if error is None else _as_tensorflow(error))

    if call.is_here:
        try:
            engine.run(request)
        finally:
            if not request.is_done:
                call.leave_memory()
        finished(request)
    else:
        request.finished = finished
        engine.submit(request, at_once=True)


def _as_tensorflow(error: BaseException) -> BaseException:
    """Return an error whose class in `tf.errors` is the one that Horovod's programs expect."""
    if not isinstance(error, HorovodInternalError):
        return error
    differs = error.__cause__ is None or isinstance(
        error.__cause__, (ArgumentError, ArgumentTypeError)
    )
    return OperationError(Code.FAILED_PRECONDITION if differs else Code.UNKNOWN, str(error))


@_collective
def _all_reduce(call: Call, engine: Engine) -> None:
    arrays = call.inputs()
    outputs = [call.output(index, x.shape, x.dtype) for index, x in enumerate(arrays)]
    is_adasum = call.node.attributes["reduce_op"] == ReduceOp.ADASUM
    kind = Kind.ADASUM if is_adasum else Kind.ALLREDUCE
    _run(call, engine, _request(call, kind, arrays, outputs=outputs))


def _give_results(call: Call) -> Callable[[Request], None]:
    def give(request: Request) -> None:
        for index, x in enumerate(request.results or ()):
            call.give(index, x)

    return give


@_collective
def _all_gather(call: Call, engine: Engine) -> None:
    _run(call, engine, _request(call, Kind.ALLGATHER, call.inputs()), _give_results(call))


@_collective
def _reduce_scatter(call: Call, engine: Engine) -> None:
    arrays = call.inputs()
    if any(x.ndim == 0 for x in arrays):
        raise ValueError("Reducescatter does not support scalar inputs")
    _run(call, engine, _request(call, Kind.REDUCESCATTER, arrays), _give_results(call))


@_collective
def _broadcast(call: Call, engine: Engine) -> None:
    (x,) = call.inputs()
    root_rank = call.node.attributes["root_rank"]
    root = root_of(root_rank, process_sets.of(_set_id(call.node)))
    if root == engine.comm.rank:
        call.pass_on(0, 0)
        y = x
    else:
        y = call.output(0, x.shape, x.dtype)
    _run(call, engine, _request(call, Kind.BROADCAST, [x], outputs=[y], root=root))


@_collective
def _all_to_all(call: Call, engine: Engine) -> None:
    x, splits = call.inputs()
    if splits.ndim > 1:
        raise ValueError("alltoall expects a 1D splits tensor")
    n_rows = x.shape[0] if x.ndim else 0
    rows = rows_for_each(splits.tolist(), n_rows, process_sets.of(_set_id(call.node)))

    def end(request: Request) -> None:
        assert request.results is not None
        call.give(0, request.results[0])
        call.give(1, np.array(request.received_splits, np.int32))

    if rows is not None:
        x = x[: sum(rows)]
    _run(call, engine, _request(call, Kind.ALLTOALL, [x], splits=rows), end)


@_collective
def _join(call: Call, engine: Engine) -> None:
    def end(request: Request) -> None:
        call.give(0, np.array(request.last_joined, np.int32))

    _run(call, engine, Request(Kind.JOIN, "join", _ARRAYS), end)


def _answer(answer: Callable[[Node], int]) -> Callable[[Call], None]:
    def compute(call: Call) -> None:
        try:
            call.give(0, np.array(answer(call.node), np.int32))
        except ValueError as e:
            raise OperationError(Code.FAILED_PRECONDITION, str(e)) from e
        call.finish()

    return compute


def registered() -> ModuleType:
    """Register the ops; return a module with a function for each: ``horovod_allreduce``."""
    return register([*_collectives(), *_questions()])


def _collectives() -> list[Operation]:
    group, one = ("num_tensors: int",), ()
    some = "tensors: num_tensors * T", "outputs: num_tensors * T"
    single = "tensor: T", "output: T"
    made = []
    for prefix, count, (x, y) in (("Horovod", one, single), ("HorovodGrouped", group, some)):
        for name, compute, attributes, shapes in (
            ("Allreduce", _all_reduce, (_REDUCED, *_FACTORS), Shapes.same),
            ("Allgather", _all_gather, (_MOVED,), Shapes.rows),
            ("Reducescatter", _reduce_scatter, (_SCATTERED, *_FACTORS), _scattered),
        ):
            attributes = (*attributes, *count, *_NAMED)
            made.append(Operation(prefix + name, compute, (x,), (y,), attributes, shapes))
    x, y = single
    rooted, moved = (_MOVED, "root_rank: int", *_NAMED), (_MOVED, *_NAMED)
    splits, received = "splits: int32", "received_splits: int32"
    return [
        *made,
        Operation("HorovodBroadcast", _broadcast, (x,), (y,), rooted, Shapes.same),
        Operation("HorovodAlltoall", _all_to_all, (x, splits), (y, received), moved, _exchanged),
        Operation("HorovodJoin", _join, (), ("output: int32",), ordered=True),
    ]


def _questions() -> list[Operation]:
    """Return the ops that answer when the graph runs: the answers change in elastic training."""
    of_a_set = ("process_set_id: int = 0",)
    return [
        Operation(name, _answer(answer), (), (f"{output}: int32",), attributes)
        for name, output, attributes, answer in (
            ("HorovodSize", "size", of_a_set, lambda node: process_sets.of(_set_id(node)).size()),
            (
                "HorovodProcessSetIncluded",
                "included",
                of_a_set,
                lambda node: process_sets.of(_set_id(node)).included(),
            ),
            ("HorovodRank", "rank", (), lambda node: basics.rank()),
            ("HorovodLocalSize", "local_size", (), lambda node: basics.local_size()),
            ("HorovodLocalRank", "local_rank", (), lambda node: basics.local_rank()),
        )
    ]
