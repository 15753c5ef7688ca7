"""Ops and kernels of TensorFlow whose code is Python: described once, registered by `register`."""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.util
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from tensorflow.core.framework import node_def_pb2, op_def_pb2
from tensorflow.python.framework import _pywrap_python_op_gen, auto_control_deps, op_def_registry

from gpucoll.blocks import Block
from gpucoll.integrations.tensorflow import c_api, tensors
from gpucoll.integrations.tensorflow.c_api import Code, Done, OperationError, Status, api
from gpucoll.integrations.tensorflow.shapes import Shapes

__all__ = ["Call", "Compiled", "Node", "Operation", "address_of", "register", "running_here"]


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Parameters
    ----------
    address : int
        Of the function ``(kernel, context)``.
    prepare : callable
        Given a `Node`, and the address of the Python kernel of the same form, returns the block
        whose address the function gets as `kernel`.
    """

    address: int
    prepare: Callable[[Node, int], Block]


@dataclass(frozen=True)
class Operation:
    """An op of TensorFlow. It has effects: TensorFlow neither folds nor merges calls.

    Parameters
    ----------
    name : str
        In CamelCase; must be new to TensorFlow.
    compute : callable
        Given a `Call`, sees to it that `Call.finish` is called: before it returns, or later, from
        any thread. An exception is the op's error: `OperationError` with its code.
    inputs, outputs, attributes : sequence of str
        As TensorFlow's REGISTER_OP has them: ``"x: T"``, ``"T: {float, double}"``.
    shapes : callable
        Given a `Shapes`, sets the shapes of the outputs.
    ordered : bool
        Whether calls inside a tf.function run one at a time, in the order of the program, and also
        if nobody uses their outputs.
    synchronous : bool
        Whether `compute` finishes before it returns. In eager mode it then runs on the thread of
        the program. `register` finishes the call unless it failed.
    compiled : Compiled, optional
        What TensorFlow calls instead, of a synchronous op.
    """

    name: str
    compute: Callable[[Call], None]
    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()
    attributes: Sequence[str] = ()
    shapes: Callable[[Shapes], None] = Shapes.scalars
    ordered: bool = False
    synchronous: bool = False
    compiled: Compiled | None = None


@dataclass(frozen=True)
class Node:
    """A node of a graph; of an eager call, it has the op's name."""

    name: str
    attributes: dict[str, Any]
    """Those that are numbers, texts or truth values."""


class Call:
    """One execution of an op: its inputs, and places for its outputs.

    Attributes
    ----------
    node : Node
        Its name and attributes.
    is_here : bool
        Whether the thread that called the op waits for it (see `running_here`).
    """

    __slots__ = ("_context", "_done", "_kept", "_status", "is_here", "node")

    def __init__(self, node: Node, context: int, callback: int | None = None) -> None:
        self.node = node
        self.is_here = getattr(_caller, "waits", False)
        self._context, self._status = context, _statuses.pop() if _statuses else Status()
        self._kept: list[int] = []
        self._done: Callable[[], None] | None = None
        if callback is not None and self.is_here:
            self._done = lambda: api.RunAsyncOpKernelDoneCallback(callback)
        elif callback is not None:
            self._done = Done(callback)

    def inputs(self, first: int = 0) -> list[np.ndarray[Any, Any]]:
        """Return the inputs from a number on: views that live until `finish`."""
        return [tensors.view(self._input(x)) for x in range(first, api.NumInputs(self._context))]

    def output(
        self, index: int, shape: Sequence[int], dtype: np.dtype[Any]
    ) -> np.ndarray[Any, Any]:
        """Allocate an output and return it, to be written before `finish`."""
        tensor, array = tensors.output(self._context, index, shape, dtype, self._status)
        self._kept.append(tensor)
        return array

    def give(self, index: int, array: np.ndarray[Any, Any]) -> None:
        """Copy an array into an output."""
        self.output(index, array.shape, array.dtype)[...] = array

    def pass_on(self, source: int, index: int) -> None:
        """Make an input an output, without a copy."""
        api.SetOutput(self._context, index, self._input(source), self._status.address)
        self._status.check()

    def leave_memory(self) -> None:
        """Never free the inputs and outputs: somebody may still read or write them."""
        self._kept = []

    def finish(self, error: BaseException | None = None) -> None:
        """End the execution; nothing of it may be used afterwards."""
        for tensor in self._kept:
            api.DeleteTensor(tensor)
        self._kept.clear()
        if error is not None:
            code = error.code if isinstance(error, OperationError) else Code.INTERNAL
            text = str(error) if isinstance(error, OperationError) else repr(error)
            self._status.set(code, text)
            api.OpKernelContext_Failure(self._context, self._status.address)
        else:
            _statuses.append(self._status)
        if self._done is not None:
            self._done()

    def _input(self, index: int) -> int:
        tensor = ctypes.c_void_p()
        api.GetInput(self._context, index, ctypes.byref(tensor), self._status.address)
        if tensor.value is None:
            self._status.check()
        self._kept.append(tensor.value)  # type: ignore[arg-type]
        return tensor.value  # type: ignore[return-value]


class running_here:  # noqa: N801 - a context manager
    """Says that this thread waits for the ops that it calls, as it does in eager mode.

    TensorFlow then runs the kernel on this thread, too, and the kernel may wait itself. Ctrl-C in
    a kernel is the program's KeyboardInterrupt, not an error of TensorFlow.
    """

    def __enter__(self) -> None:
        _caller.waits, _caller.interrupt = True, None

    def __exit__(self, *_: object) -> None:
        _caller.waits = False
        if _caller.interrupt is not None:
            raise _caller.interrupt


_caller = threading.local()
_statuses: list[Status] = []
"""Those that no call uses."""
_nodes: dict[int, Node] = {}
_blocks: dict[int, Block] = {}
_keys = itertools.count(1)
_callbacks: list[Any] = []
"""What TensorFlow calls: never freed, since ops stay registered until the process ends."""


def register(operations: Sequence[Operation]) -> ModuleType:
    """Register ops and their CPU kernels; return a module with a function for each.

    The functions are those that TensorFlow's `load_op_library` makes: ``GpucollSum`` is called as
    ``module.gpucoll_sum(x, name=None)``, eagerly and in graphs, and tapes see it.
    """
    for operation in operations:
        if op_def_registry.get(operation.name) is not None:  # TensorFlow would abort the process
            raise RuntimeError(f"TensorFlow has an op {operation.name} already, of another library")
        _register_definition(operation)
        _register_kernel(operation)
    # TensorFlow knows its own collectives in the same way: they run at once.
    unordered = {x.name for x in operations if not x.ordered}
    auto_control_deps.ASYNC_STATEFUL_OPS = auto_control_deps.ASYNC_STATEFUL_OPS | unordered
    found = [op_def_registry.get(x.name) for x in operations]
    source = _pywrap_python_op_gen.GetPythonWrappers(
        op_def_pb2.OpList(op=found).SerializeToString()
    ).decode()
    name = f"gpucoll_ops_{operations[0].name}"
    spec = importlib.util.spec_from_loader(name, _Source(source))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._IS_TENSORFLOW_PLUGIN = True  # type: ignore[attr-defined]  # AutoGraph lets it be
    return module


class _Source(importlib.abc.InspectLoader):
    """A module whose source TensorFlow writes."""

    def __init__(self, source: str) -> None:
        self._source = source

    def get_source(self, fullname: str) -> str:
        return self._source


def address_of(callback: Any) -> int:
    """Return the address of a function of ctypes."""
    return ctypes.cast(callback, ctypes.c_void_p).value or 0


def _register_definition(operation: Operation) -> None:
    @c_api.SHAPES
    def shapes(context: int, status: int) -> None:
        try:
            operation.shapes(Shapes(context))
        except OperationError as e:
            api.SetStatus(status, e.code, e.message.encode())
        except Exception as e:
            api.SetStatus(status, Code.INTERNAL, repr(e).encode())

    builder = api.NewOpDefinitionBuilder(operation.name.encode())
    for attribute in operation.attributes:
        api.OpDefinitionBuilderAddAttr(builder, attribute.encode())
    for x in operation.inputs:
        api.OpDefinitionBuilderAddInput(builder, x.encode())
    for x in operation.outputs:
        api.OpDefinitionBuilderAddOutput(builder, x.encode())
    api.OpDefinitionBuilderSetIsStateful(builder, True)
    api.OpDefinitionBuilderSetShapeInferenceFunction(builder, shapes)
    _callbacks.append(shapes)
    status = Status()
    api.RegisterOpDefinition(builder, status.address)
    status.check()


def _register_kernel(operation: Operation) -> None:
    @c_api.CREATE
    def create(construction: int) -> int:
        status = Status()
        buffer = api.OpKernelConstruction_GetNodeDef(construction, status.address)
        node = node_def_pb2.NodeDef.FromString(
            ctypes.string_at(buffer.contents.data, buffer.contents.length)
        )
        api.DeleteBuffer(buffer)
        values = {name: getattr(x, x.WhichOneof("value")) for name, x in node.attr.items()}
        made, key = Node(node.name, values), next(_keys)
        if operation.compiled is not None:
            block = operation.compiled.prepare(made, address_of(compute))
            key = int(block.address)
            _blocks[key] = block
        _nodes[key] = made
        return key

    def run(call: Call) -> None:
        try:
            operation.compute(call)
            if operation.synchronous:
                call.finish()
        except BaseException as e:
            if call.is_here and not isinstance(e, Exception):
                _caller.interrupt = e
            call.finish(e)

    @c_api.COMPUTE
    def compute(kernel: int, context: int) -> None:
        run(Call(_nodes[kernel], context))

    @c_api.ASYNC_COMPUTE
    def compute_later(kernel: int, context: int, callback: int) -> None:
        run(Call(_nodes[kernel], context, callback))

    @c_api.DELETE
    def delete(kernel: int) -> None:
        _nodes.pop(kernel, None)
        _blocks.pop(kernel, None)

    name = operation.name.encode()
    if operation.synchronous:
        called = compute
        if operation.compiled is not None:
            called = c_api.COMPUTE(operation.compiled.address)
        builder = api.NewKernelBuilder(name, b"CPU", create, called, delete)
    else:
        builder = api.NewAsyncKernelBuilder(name, b"CPU", create, compute_later, delete)
    _callbacks.extend((create, compute, compute_later, delete))
    status = Status()
    api.RegisterKernelBuilder(name, builder, status.address)
    status.check()
