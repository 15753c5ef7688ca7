"""What `fit` needs beside averaged gradients: equal weights, equal logs, equal numbers of steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from gpucoll.integrations.keras.gradients import all_reduce
from gpucoll.integrations.keras.optimizer import communicator_of
from gpucoll.integrations.native import chosen

if TYPE_CHECKING:
    from gpucoll import Communicator

__all__ = ["DataParallel", "average_logs", "broadcast_variables"]

_STATISTICS = ("moving_mean", "moving_variance")
_SEEDS = "seed_generator_state"
_END = (1,) * 7
"""A shape that no gradients of int32 have."""


def broadcast_variables(
    variables: Sequence[Any], root: int = 0, comm: Communicator | None = None
) -> None:
    """Overwrite variables of Keras by those of one rank, in one fused call for each dtype.

    Parameters
    ----------
    variables : list of keras.Variable
        Such as ``model.variables + optimizer.variables``; of the same shapes on all ranks. States
        of random generators are left out: each rank goes on with its own.
    root : int
        The rank whose values all get.
    comm : Communicator, optional
        The ranks. Default: that of the latest `gpucoll.init`.

    Raises
    ------
    gpucoll.MismatchError
        The ranks' variables differ in shape, dtype or number.
    """
    comm = chosen(comm, "broadcast_variables")
    sent = [x for x in variables if x.name != _SEEDS]
    values = [np.array(keras.ops.convert_to_numpy(x), order="C") for x in sent]
    if values:
        comm.broadcast(values, root, out=values)
    if comm.rank != root:
        for variable, value in zip(sent, values, strict=True):
            variable.assign(value)


def average_logs(logs: Mapping[str, Any], comm: Communicator | None = None) -> dict[str, Any]:
    """Return the averages over all ranks of losses and metrics, the same on all ranks.

    Parameters
    ----------
    logs : dict
        Names and numbers (or arrays), such as ``model.evaluate(..., return_dict=True)``.
    comm : Communicator, optional
        The ranks. Default: that of the latest `gpucoll.init`.

    Raises
    ------
    ValueError
        On all ranks: their logs have different names.

    Notes
    -----
    Of a metric that is no mean over samples, such as AUC, this is the mean of the ranks' values.
    """
    mine = {name: np.asarray(value, np.float64) for name, value in logs.items()}
    rows = chosen(comm, "average_logs").all_gather_object(mine)
    _check_equal("logs have different names", [sorted(row) for row in rows])
    means = {name: sum(row[name] for row in rows) / len(rows) for name in mine}
    return {name: float(mean) if np.ndim(mean) == 0 else mean for name, mean in means.items()}


class DataParallel(keras.callbacks.Callback):
    """The first callback of a `fit` whose optimizer is a `DistributedOptimizer`.

    - Before the first batch all ranks get the variables of the model and the optimizer from `root`.
    - At the end of an epoch the logs, of validation too, become averages over the ranks. Callbacks
      after this one (`EarlyStopping`, `ReduceLROnPlateau`, `History`) therefore decide alike on all
      ranks. If callbacks before this one have decided differently, all ranks raise an error.
    - At the beginning of `fit` the ranks compare numbers of steps and epochs.

    Parameters
    ----------
    comm : Communicator, optional
        The ranks: those of the optimizer, which are the default.
    root : int
        The rank whose variables all ranks begin with.
    learning_rate : float, optional
        A learning rate for one process; it is multiplied by the number of ranks, at each `fit`.
        Default: the optimizer's stays as it is.
    warmup_epochs : int
        With `learning_rate`: it grows from its value for one process to that for all ranks, batch
        by batch, for as many epochs.
    average_statistics : bool
        Average the means and variances that `BatchNormalization` keeps over the ranks, at the end
        of each epoch and before its validation. Otherwise they stay those of each rank's batches.

    Raises
    ------
    ValueError
        When `fit` begins or an epoch ends: the optimizer is no `DistributedOptimizer`, the model is
        not built, or ranks have different numbers of steps, names of logs, learning rates or
        decisions to stop.
    """

    def __init__(
        self,
        comm: Communicator | None = None,
        *,
        root: int = 0,
        learning_rate: float | None = None,
        warmup_epochs: int = 0,
        average_statistics: bool = False,
    ) -> None:
        super().__init__()
        if warmup_epochs and learning_rate is None:
            raise ValueError("warmup_epochs needs learning_rate: that of one process")
        self._comm, self._root = comm, root
        self._learning_rate, self._warmup_epochs = learning_rate, warmup_epochs
        self._averages_statistics = average_statistics
        self.comm: Any = comm
        self._is_training = self._is_broadcast = False
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Compare what the ranks are going to do."""
        comm = communicator_of(self.model.optimizer)
        if comm is None:
            raise ValueError(
                "the model's optimizer does not average gradients: pass DistributedOptimizer(...) "
                "to compile; for a loaded model call DistributedOptimizer(model.optimizer)"
            )
        if self._comm not in (None, comm):
            raise ValueError(
                f"the model's optimizer averages over {comm!r}, and DataParallel got {self._comm!r}"
            )
        self.comm = comm
        plans = self.comm.all_gather_object(
            {"epochs": self.params.get("epochs"), "steps": self.params.get("steps")}
        )
        _check_equal(
            "numbers of epochs or steps differ, and ranks would wait for each other: shard() makes "
            "equal parts",
            plans,
        )
        self._is_training, self._is_broadcast = True, False
        if self._learning_rate is not None and not self._warmup_epochs:
            self.model.optimizer.learning_rate = self._learning_rate * self.comm.world_size

    def on_train_end(self, logs: Any = None) -> None:
        """Note that `fit` ends."""
        self._is_training = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Broadcast variables before the first batch; set the learning rate."""
        _raise_failed(self.model)
        if self._learning_rate is not None and self._epoch < self._warmup_epochs:
            self._warm_up(batch)
        if not self._is_broadcast:
            self._broadcast()
            self._is_broadcast = True

    def on_test_begin(self, logs: Any = None) -> None:
        """Average statistics before the validation of an epoch."""
        if self._is_training:
            self._average_statistics()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average logs, in their place."""
        self._meet(epoch)
        optimizer = self.model.optimizer
        mine = {
            "learning rates": float(keras.ops.convert_to_numpy(optimizer.learning_rate)),
            "decisions to stop": bool(self.model.stop_training),
        }
        rows = self.comm.all_gather_object(mine)
        for name in mine:
            _check_equal(
                f"{name} differ, because a callback before DataParallel read logs of its rank: let "
                "DataParallel be the first callback",
                [row[name] for row in rows],
            )
        self._average_statistics()
        if logs:
            logs.update(average_logs(logs, self.comm))

    def _meet(self, epoch: int) -> None:
        """Wait for all ranks, where the gradients go: a rank that has more batches meets this."""
        # JAX may still run the last step. Its error must not be missed, nor taken for this one's.
        smallest = sorted(self.model.trainable_variables, key=lambda x: math.prod(x.shape))[:1]
        for variable in smallest:
            keras.ops.convert_to_numpy(variable)
        try:
            keras.ops.convert_to_numpy(
                all_reduce(self.comm, [keras.ops.zeros(_END, "int32")], "max")[0]
            )
        except Exception as error:
            if "MismatchError" not in f"{type(error).__name__} {error}":
                raise
            raise ValueError(
                f"rank {self.comm.rank} has ended epoch {epoch + 1}, and another rank goes on: it "
                f"has more batches. shard() makes parts with equally many. {error}"
            ) from error

    def _broadcast(self) -> None:
        model, optimizer = self.model, self.model.optimizer
        if not model.built:
            raise ValueError(
                "the model is not built, so it has no variables that ranks could share: begin it "
                "with keras.Input, or call it once before fit"
            )
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        broadcast_variables([*model.variables, *optimizer.variables], self._root, self.comm)

    def _warm_up(self, batch: int) -> None:
        steps = self.params.get("steps")
        if not steps:
            raise ValueError("warmup_epochs needs a data set whose number of batches is known")
        assert self._learning_rate is not None
        done = (self._epoch + (batch + 1) / steps) / self._warmup_epochs
        factor = 1 + (self.comm.world_size - 1) * min(done, 1)
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()  # the trainer holds the variables between batches
        self.model.optimizer.learning_rate = self._learning_rate * factor

    def _average_statistics(self) -> None:
        if not self._averages_statistics:
            return
        kept = [x for x in self.model.non_trainable_variables if x.name in _STATISTICS]
        values = [np.array(keras.ops.convert_to_numpy(x), order="C") for x in kept]
        if values:
            self.comm.all_reduce(values, op="avg", out=values)
        for variable, value in zip(kept, values, strict=True):
            variable.assign(value)


def _raise_failed(model: Any) -> None:
    """Raise the error of a step that JAX has run; it would run the epoch to its end otherwise."""
    state = getattr(model, "_jax_state", None) or {}
    for array in state.get("trainable_variables", [])[:1]:
        if array.is_ready():
            array.block_until_ready()


def _check_equal(what: str, values: Sequence[Any]) -> None:
    """Raise ValueError, on all ranks, unless the ranks' values are equal."""
    if any(value != values[0] for value in values):
        found = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
        raise ValueError(f"the ranks' {what} ({found})")
