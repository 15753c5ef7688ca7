"""What is known of an op's shapes while a graph is built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpucoll.integrations.tensorflow.c_api import Code, OperationError, Status, api

__all__ = ["Shapes"]

_ANY = 2**64 - 1  # a dimension of -1: nobody knows it
_ALL = 2**63 - 1


class Shapes:
    """The shapes of an op's inputs, and places for those of its outputs.

    Parameters
    ----------
    context : int
        The TF_ShapeInferenceContext.
    """

    def __init__(self, context: int) -> None:
        self._context, self._status = context, Status()

    def __len__(self) -> int:
        """Return the number of inputs."""
        return int(api.ShapeInferenceContextNumInputs(self._context))

    def scalars(self) -> None:
        """Say that the only output is a scalar."""
        shape = api.ShapeInferenceContextScalar(self._context)
        self._set(0, shape)
        api.DeleteShapeHandle(shape)

    def same(self) -> None:
        """Say that outputs have the shapes of the inputs."""
        for index in range(len(self)):
            with self._input(index) as shape:
                self._set(index, shape)

    def rows(self) -> None:
        """Say that outputs have the shapes of the inputs, with any number of rows."""
        for index in range(len(self)):
            self.free_rows(index)

    def free_rows(self, index: int, source: int | None = None) -> None:
        """Say that an output has the shape of an input, with any number of rows.

        Parameters
        ----------
        source : int, optional
            The input. Default: that of the same number.
        """
        given = index if source is None else source
        with self._input(given) as shape, self._new() as rest, self._new() as result:
            status = self._status.address
            if not api.ShapeInferenceContextRankKnown(self._context, shape):
                self._set(index, shape)
                return
            if api.ShapeInferenceContextRank(self._context, shape) == 0:
                raise OperationError(
                    Code.INVALID_ARGUMENT, "Shape must be at least rank 1 but is rank 0"
                )
            api.ShapeInferenceContextSubshape(self._context, shape, 1, _ALL, rest, status)
            rows = api.ShapeInferenceContextVectorFromSize(self._context, _ANY)
            api.ShapeInferenceContextConcatenateShapes(self._context, rows, rest, result, status)
            api.DeleteShapeHandle(rows)
            self._status.check()
            self._set(index, result)

    def is_scalar(self, index: int) -> bool:
        """Return whether an input is known to be a scalar."""
        with self._input(index) as shape:
            known = api.ShapeInferenceContextRankKnown(self._context, shape)
            return bool(known and api.ShapeInferenceContextRank(self._context, shape) == 0)

    def keep(self, index: int, source: int | None = None) -> None:
        """Say that an output has the shape of an input; by default, of that of the same number."""
        with self._input(index if source is None else source) as shape:
            self._set(index, shape)

    @contextmanager
    def _new(self) -> Iterator[int]:
        handle = api.NewShapeHandle()
        try:
            yield handle
        finally:
            api.DeleteShapeHandle(handle)

    @contextmanager
    def _input(self, index: int) -> Iterator[int]:
        with self._new() as handle:
            api.ShapeInferenceContextGetInput(self._context, index, handle, self._status.address)
            self._status.check()
            yield handle

    def _set(self, index: int, shape: int) -> None:
        api.ShapeInferenceContextSetOutput(self._context, index, shape, self._status.address)
        self._status.check()
