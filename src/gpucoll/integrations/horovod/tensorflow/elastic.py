"""Elastic training with TensorFlow: the state of a model, or of variables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from gpucoll.integrations.horovod import elastic
from gpucoll.integrations.horovod.basics import rank
from gpucoll.integrations.horovod.elastic import ObjectState
from gpucoll.integrations.horovod.exceptions import HorovodInternalError
from gpucoll.integrations.horovod.objects import broadcast_object
from gpucoll.integrations.horovod.tensorflow.functions import broadcast_variables
from gpucoll.integrations.horovod.tensorflow.util import _executing_eagerly

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make a training function go on when ranks are lost or come: `horovod.elastic.run`."""

    @functools.wraps(func)
    def training(state: Any, *args: Any, **kwargs: Any) -> Any:
        with _horovods_errors():
            return func(state, *args, **kwargs)

    return elastic.run(training)


@contextmanager
def _horovods_errors() -> Iterator[None]:
    """Raise HorovodInternalError where TensorFlow says that one of Horovod's ops failed."""
    try:
        yield
    except tf.errors.UnknownError as e:
        if "Horovod" in e.message:
            raise HorovodInternalError(str(e)) from e
        raise


class TensorFlowState(ObjectState):
    """The state of variables.

    Parameters
    ----------
    variables : list of variables, optional
        Default: all of the graph.
    session : tf.compat.v1.Session, optional
        In graphs: default the current one.
    **kwargs
        Other attributes and their values.
    """

    def __init__(self, variables: Any = None, session: Any = None, **kwargs: Any) -> None:
        self.variables = variables or tf.compat.v1.global_variables()
        if _executing_eagerly():
            self.session = None
        else:
            self.session = session or tf.compat.v1.get_default_session()
            self._bcast_op = broadcast_variables(self.variables, root_rank=0)
        self._keep()
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **kwargs)

    def save(self) -> None:
        """Keep the values."""
        self._keep()
        super().save()

    def restore(self) -> None:
        """Go back to the values kept last."""
        self._put_back()
        super().restore()

    def sync(self) -> None:
        """Take over rank 0's values."""
        with _horovods_errors():
            if self.session is not None:
                self.session.run(self._bcast_op)
            else:
                broadcast_variables(self.variables, root_rank=0)
        self._keep()
        super().sync()

    def _keep(self) -> None:
        if self.session is not None:
            self._values = self.session.run(list(self.variables))
        else:
            self._values = [x.numpy() for x in self.variables]

    def _put_back(self) -> None:
        for x, value in zip(self.variables, self._values, strict=True):
            if self.session is not None:
                x.load(value, self.session)
            else:
                x.assign(value)


class TensorFlowKerasState(TensorFlowState):
    """The state of a model and its optimizer.

    Parameters
    ----------
    model : keras.Model
        Built.
    optimizer : optional
        Default: the model's.
    backend : module, optional
        Keras' backend: has the session, in graphs.
    **kwargs
        Other attributes and their values, as ``batch`` and ``epoch``.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        if not getattr(model, "built", True):
            raise ValueError("Model must be built first. Run `model.build(input_shape)`.")
        self.model, self.optimizer = model, optimizer or model.optimizer
        session = None
        if not _executing_eagerly():
            session = (backend or tf.compat.v1.keras.backend).get_session()
        super().__init__(self._all(), session, **kwargs)

    def save(self) -> None:
        """Keep the values of all variables that there are by now."""
        self.variables = self._all()
        super().save()

    def sync(self) -> None:
        """Take over rank 0's values."""
        self.variables = self._all()
        super().sync()

    def _all(self) -> Sequence[Any]:
        from gpucoll.integrations.horovod.tensorflow._keras.optimizer import variables_of

        return [*self.model.variables, *variables_of(self.optimizer)]
