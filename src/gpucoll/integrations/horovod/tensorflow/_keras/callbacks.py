"""Callbacks of training: each is a class without Keras, to be combined with its `Callback`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gpucoll.integrations.horovod.basics import rank, size
from gpucoll.integrations.horovod.tensorflow._keras.optimizer import variables_of
from gpucoll.integrations.horovod.tensorflow.functions import (
    broadcast_global_variables,
    broadcast_variables,
)
from gpucoll.integrations.horovod.tensorflow.gradients import LocalVariables
from gpucoll.integrations.horovod.tensorflow.reductions import allreduce
from gpucoll.integrations.horovod.tensorflow.util import _executing_eagerly

__all__ = [
    "BroadcastGlobalVariables",
    "LearningRateSchedule",
    "LearningRateWarmup",
    "MetricAverage",
    "callback",
    "checkpoint",
]


def callback(keras: Any, implementation: type, module: str) -> type:
    """Return a class of callbacks for a Keras, named as Horovod's."""
    name = f"{implementation.__name__}Callback"
    contents = {"__doc__": implementation.__doc__, "__module__": module}
    return type(name, (implementation, keras.callbacks.Callback), contents)


class _Implementation:
    model: Any
    params: dict[str, Any]


class BroadcastGlobalVariables(_Implementation):
    """Gives all ranks the variables of one, after the first batch has made all of them.

    Parameters
    ----------
    root_rank : int
    device : str
    local_variables : variable or list of variables, optional
        What is left as it is on each rank.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self.broadcast_done = False
        self._local = LocalVariables()
        given = [local_variables] if isinstance(local_variables, tf.Variable) else local_variables
        if not all(isinstance(x, tf.Variable) for x in given or ()):
            raise ValueError("All local variables must be of tf.Variable type.")
        for x in given or ():
            self.register_local_var(x)

    def register_local_var(self, var: Any) -> None:
        """Leave a variable as it is on each rank."""
        self._local.add(var)

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.broadcast_done:
            return
        with tf.device(self.device):
            if _executing_eagerly():
                variables = [x for x in self.model.variables if x not in self._local]
                broadcast_variables(variables, self.root_rank)
                broadcast_variables(variables_of(self.model.optimizer), self.root_rank)
            else:
                session = tf.compat.v1.keras.backend.get_session()
                session.run(broadcast_global_variables(self.root_rank))
        self.broadcast_done = True


class MetricAverage(_Implementation):
    """Averages the metrics of an epoch over the ranks; stands before callbacks that read them."""

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for name in sorted(logs or {}):
            with tf.device(self.device):
                mean = allreduce(tf.constant(logs[name]), name=None)
            if _executing_eagerly():
                logs[name] = mean.numpy()
            else:
                logs[name] = tf.compat.v1.keras.backend.get_session().run(mean)


class LearningRateSchedule(_Implementation):
    """Sets the learning rate to a multiple of the initial one.

    Parameters
    ----------
    initial_lr : float
    multiplier : float or callable
        A function of the epoch; a number: its power, from `start_epoch` on.
    start_epoch, end_epoch : int
    staircase : bool
        Whether the rate changes at the beginning of an epoch only, not in every batch.
    momentum_correction : bool
        Whether the momentum of the first batch with a new rate is scaled as the rate is.
    steps_per_epoch : int, optional
        Default: what Keras says.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction = staircase, momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.multiplier: Callable[[float], float] = (
            multiplier
            if callable(multiplier)
            else lambda epoch: multiplier ** (epoch - start_epoch)
        )
        self.current_epoch = 0
        self.restore_momentum: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = self.params.get("steps")
        if not self.steps_per_epoch:
            raise ValueError(
                "Could not autodetect the number of steps per epoch. Please specify the "
                f"steps_per_epoch parameter to the {type(self).__name__}() or upgrade to the "
                "latest version of Keras."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        is_over = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or is_over:
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._adjust(self.current_epoch)

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.restore_momentum is not None:
            _set(self.model.optimizer, "momentum", self.restore_momentum)
            self.restore_momentum = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = _get(self.model.optimizer, "learning_rate")

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before = _get(optimizer, "learning_rate")
        now = self.initial_lr * self.multiplier(epoch)
        _set(optimizer, "learning_rate", now)
        if self.momentum_correction and getattr(optimizer, "momentum", None):
            self.restore_momentum = _get(optimizer, "momentum")
            _set(optimizer, "momentum", self.restore_momentum * now / before)


class LearningRateWarmup(LearningRateSchedule):
    """Raises the learning rate from that of one rank to that of all of them, over some epochs.

    Parameters
    ----------
    initial_lr : float
        That of all ranks: the rate for one times their number.
    warmup_epochs : int
    momentum_correction, steps_per_epoch
        As for the schedule.
    verbose : int
        More than 0: rank 0 prints when it is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            epoch += 1.0 / self.steps_per_epoch  # whole numbers at the ends of epochs
            return (epoch * (size() - 1) / warmup_epochs + 1) / size()

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        assert self.end_epoch is not None
        if epoch == self.end_epoch - 1 and self.verbose > 0 and rank() == 0:
            now = _get(self.model.optimizer, "learning_rate")
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {now:g}.")


def _get(optimizer: Any, name: str) -> float:
    return float(tf.keras.backend.get_value(getattr(optimizer, name)))


def _set(optimizer: Any, name: str, value: float) -> None:
    held = getattr(optimizer, name)
    if hasattr(held, "assign"):
        held.assign(value)
    else:
        setattr(optimizer, name, value)


def checkpoint(keras: Any, module: str) -> type:
    """Return the class of checkpoints that keep the best model."""

    class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
        """Saves the best model; who trains sets its ``filepath`` first.

        The parameters are those of Keras' ``ModelCheckpoint``.
        """

        def __init__(
            self,
            monitor: str = "val_loss",
            verbose: int = 0,
            save_weights_only: bool = False,
            mode: str = "auto",
            save_freq: str = "epoch",
        ) -> None:
            is_keras_3 = hasattr(keras, "ops")  # it wants to see a name at once
            name = "best.weights.h5" if save_weights_only else "best.keras"
            super().__init__(
                filepath=name if is_keras_3 else None,
                monitor=monitor,
                verbose=verbose,
                save_best_only=True,
                save_weights_only=save_weights_only,
                mode=mode,
                save_freq=save_freq,
            )

    BestModelCheckpoint.__module__ = module
    return BestModelCheckpoint
