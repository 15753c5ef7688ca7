"""`Streaming`: a strategy around another one, whose server holds one reply and the sum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from gpucoll.errors import ArgumentError
from gpucoll.federated.aggregation import WeightedMean
from gpucoll.integrations.flower.around import Around
from gpucoll.integrations.flower.records import free_arrays, only_record


class Streaming(Around):
    """A strategy that averages replies as they come, and holds one of them at a time.

    ``strategy = Streaming(FedAvg(...))``. Flower's own `start` collects the replies of all clients
    before it averages them. Here each is added to a `WeightedMean` and freed. The strategy
    inside gets one reply with the mean: use those that work with the mean alone, such as FedAvg,
    FedAvgM, FedProx, FedAdam and FedYogi, not those that compare clients.

    Parameters
    ----------
    strategy : flwr.serverapp.strategy.FedAvg
        It, or a subclass: chooses clients, makes the new arrays, and does all of the evaluation.
    poll_s : float
        How often to ask for replies that have not come. Each asks for one, so that no more than one
        is in memory.

    Notes
    -----
    The mean is that of `WeightedMean`, in the order in which replies come. The last bits differ
    from FedAvg's, which divides the weights first. Arrays of integers are averaged as float64, as
    FedAvg does. Metrics are aggregated by the strategy's own function. Memory: the sum, and of one
    reply the bytes and the arrays made of them.
    """

    def __init__(self, strategy: Any, *, poll_s: float = 1.0) -> None:
        for name in ("weighted_by_key", "train_metrics_aggr_fn"):
            if not hasattr(strategy, name):
                raise ArgumentError(
                    f"Streaming needs a strategy that averages, such as FedAvg; "
                    f"{type(strategy).__name__} has no {name}"
                )
        super().__init__(strategy, poll_s)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the replies one by one, and pass the mean on."""
        mean: WeightedMean | None = None
        metrics: list[RecordDict] = []
        passed: list[Message] = []  # errors, and in the end the mean in the last reply
        last: Message | None = None
        for reply in replies:
            if reply.has_error():
                passed.append(reply)
                continue
            arrays = _arrays(reply.content)
            weight = self._weight(reply.content)
            mean = mean or WeightedMean(arrays)
            mean.add(arrays, weight)
            metrics.append(RecordDict(dict(reply.content.metric_records)))
            free_arrays(reply.content)
            last = reply
            del arrays
        if mean is None or last is None:
            nothing: tuple[ArrayRecord | None, MetricRecord | None]
            nothing = self.strategy.aggregate_train(server_round, passed)
            return nothing
        whole = ArrayRecord({name: Array(array) for name, array in mean.result().items()})
        of_all = MetricRecord({self.strategy.weighted_by_key: mean.weight})
        last.content = RecordDict({"arrays": whole, "metrics": of_all})
        made, _ = self.strategy.aggregate_train(server_round, [last, *passed])
        key = self.strategy.weighted_by_key
        return made, self.strategy.train_metrics_aggr_fn(metrics, key)

    def _weight(self, content: RecordDict) -> Any:
        key = self.strategy.weighted_by_key
        _, metrics = only_record(content, "metric", "the reply to a train message")
        if not isinstance(metrics.get(key), int | float):
            raise ArgumentError(
                f"the metric {key!r} is a client's weight, and must be a number; got "
                f"{metrics.get(key)!r}"
            )
        return metrics[key]


def _arrays(content: RecordDict) -> dict[str, npt.NDArray[Any]]:
    """Return a reply's arrays; integers as float64."""
    _, record = only_record(content, "array", "the reply to a train message")
    arrays = {name: array.numpy() for name, array in record.items()}
    for name, array in arrays.items():
        if array.dtype.kind != "f":
            arrays[name] = np.asarray(array, np.float64)
    return arrays
