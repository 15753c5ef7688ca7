"""What the strategy and the mod of the secure aggregation write into Flower's messages."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from gpucoll.errors import ArgumentError
from gpucoll.federated.secure_sum import SecureSum
from gpucoll.federated.secure_sum.rounding import Rounding

KEY = "gpucoll.secure-aggregation"
"""The name of the record, in messages and in a client's state."""

WORDS = np.dtype(np.uint32)


@dataclass(frozen=True)
class Task:
    """What a client must know of a round."""

    clients: int
    threshold: int
    length: int
    neighbours: int  # 0: all
    round_id: int
    client: int
    clip: float
    max_weight: float
    weight_key: str

    @staticmethod
    def read(record: ConfigRecord) -> Task:
        """Return the task that a record holds."""
        return Task(**{field.name: record[field.name] for field in fields(Task)})

    def record(self, **more: Any) -> ConfigRecord:
        """Return a record with this, and with further entries."""
        return ConfigRecord({**asdict(self), **more})

    def settings(self) -> SecureSum:
        """Return the settings of the sum."""
        return SecureSum(
            self.clients,
            self.threshold,
            self.length,
            8 * WORDS.itemsize,
            self.neighbours or None,
            round_id=self.round_id,
        )

    @property
    def levels(self) -> int:
        """The integer that stands for `max_weight`: as large as sums in 32 bits allow."""
        return ((1 << 31) - 1) // self.clients


def only_record(content: RecordDict, kind: str, what: str) -> tuple[str, Any]:
    """Return the name and the only record of a kind, "array" or "metric"."""
    records = dict(getattr(content, f"{kind}_records"))
    if len(records) != 1:
        raise ArgumentError(f"{what} must have one {kind} record; it has {len(records)}")
    return next(iter(records.items()))


def free_arrays(content: RecordDict) -> None:
    """Free the arrays of a message: Flower's records refer to themselves, and stay for a while."""
    for record in content.array_records.values():
        record.clear()


def weight_of(task: Task, content: RecordDict) -> int:
    """Return the integer that stands for a client's weight."""
    _, metrics = only_record(content, "metric", "the reply to a train message")
    weight = metrics.get(task.weight_key)
    if not isinstance(weight, int | float) or not 0 <= weight <= task.max_weight:
        raise ArgumentError(
            f"the metric {task.weight_key!r} is a client's weight, and must be a number of 0 to "
            f"max_weight = {task.max_weight}"  # which one it is would come to the server
        )
    return max(round(weight / task.max_weight * task.levels), int(weight > 0))


def encoded(task: Task, before: ArrayRecord, after: ArrayRecord, weight: int) -> npt.NDArray[Any]:
    """Return a client's vector: its update, clipped, rounded and weighted, and its weight.

    Parameters
    ----------
    task : Task
    before, after : ArrayRecord
        The arrays that the server sent, and what the training made of them.
    weight : int
        Of `weight_of`. An update of `clip` becomes this integer.
    """
    vector = np.empty(task.length, WORDS)
    rounding = Rounding(task.clip, weight, WORDS)
    begin = 0
    for name, old, new in _pairs(before, after):
        if old.shape != new.shape:
            raise ArgumentError(
                f"array {name!r} has the shape {new.shape} after training, and had {old.shape}"
            )
        change = np.subtract(new, old, dtype=np.result_type(new, np.float32))
        vector[begin : begin + change.size] = rounding.words(change)
        begin += change.size
    vector[begin:] = weight
    return vector


def decoded(clip: float, before: ArrayRecord, total: npt.NDArray[Any]) -> ArrayRecord | None:
    """Return the arrays plus the weighted mean of the updates; None if all weights are 0."""
    weight = int(total[-1])
    if not weight:
        return None
    rounding = Rounding(clip, weight, WORDS)
    arrays, begin = {}, 0
    for name, array in before.items():
        old = array.numpy()
        dtype = old.dtype if old.dtype.kind == "f" else np.dtype(np.float64)  # as FedAvg does
        change = rounding.values(total[begin : begin + old.size], np.float64)
        arrays[name] = Array(np.asarray(old + change.reshape(old.shape), dtype))
        begin += old.size
    return ArrayRecord(arrays)


def _pairs(before: ArrayRecord, after: ArrayRecord) -> Any:
    if list(before) != list(after):
        raise ArgumentError(
            f"training must return the arrays that it got, {list(before)}; got {list(after)}"
        )
    return ((name, before[name].numpy(), after[name].numpy()) for name in before)
