"""Callbacks that keep the state of elastic training, for any Keras."""

from __future__ import annotations

from typing import Any

__all__ = ["CommitState", "UpdateBatchState", "UpdateEpochState"]


class _Implementation:
    params: dict[str, Any]

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state


class CommitState(_Implementation):
    """Commits the state after a number of batches, and after each epoch.

    Parameters
    ----------
    state : State
    batches_per_commit : int
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__(state)
        self.batches_per_commit = self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.state.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.commit()


class UpdateBatchState(_Implementation):
    """Keeps ``state.batch``: the batch of the epoch, from which training goes on.

    Parameters
    ----------
    state : State
    """

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self.params.get("steps"):
            if self.steps_per_epoch is None:
                self.steps_per_epoch = self.params["steps"]
            self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpochState(_Implementation):
    """Keeps ``state.epoch``: the number of epochs done, over all beginnings.

    Parameters
    ----------
    state : State
    """

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self.initial_epoch + epoch + 1
