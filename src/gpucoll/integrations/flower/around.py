"""What strategies around another one have in common: replies that come one by one, evaluation."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy


class OneByOne:
    """Flower's grid, but that `send_and_receive` yields replies to train messages as they come.

    Flower's own returns a list with all replies. A model that was pulled is freed here before the
    next one is asked for, if whoever iterates keeps none.

    Parameters
    ----------
    grid : flwr.serverapp.Grid
    poll_s : float
        How long to wait before asking again for replies that have not come. To ask costs a request
        for each.
    """

    def __init__(self, grid: Any, poll_s: float) -> None:
        self._grid = grid
        self._poll_s = poll_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages; return the replies, for training as an iterator."""
        messages = list(messages)
        if not messages or messages[0].metadata.message_type.split(".")[0] != MessageType.TRAIN:
            found: Iterable[Message] = self._grid.send_and_receive(messages, timeout=timeout)
            return found
        ends = None if timeout is None else time.monotonic() + timeout
        return self._replies(list(self._grid.push_messages(messages)), ends)

    def _replies(self, pending: list[str], ends: float | None) -> Iterator[Message]:
        while pending:
            for one in list(pending):
                found = list(self._grid.pull_messages([one]))
                if found:
                    pending.remove(one)
                    yield found.pop()
            if pending:
                if ends is not None and time.monotonic() >= ends:
                    return
                time.sleep(self._poll_s)


class Around(Strategy):
    """A strategy around another one, which gets the mean of the replies as one reply.

    Parameters
    ----------
    strategy : flwr.serverapp.strategy.Strategy
    poll_s : float
        As of `OneByOne`.
    """

    def __init__(self, strategy: Any, poll_s: float) -> None:
        self.strategy = strategy
        self.poll_s = poll_s

    def start(self, grid: Grid, *args: Any, **kwargs: Any) -> Result:
        """Run the rounds, as ``Strategy.start`` of Flower does."""
        return super().start(OneByOne(grid, self.poll_s), *args, **kwargs)

    def summary(self) -> None:
        """Log what the strategy inside does."""
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Do what the strategy inside does."""
        chosen: Iterable[Message] = self.strategy.configure_train(
            server_round, arrays, config, grid
        )
        return chosen

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Do what the strategy inside does."""
        chosen: Iterable[Message] = self.strategy.configure_evaluate(
            server_round, arrays, config, grid
        )
        return chosen

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Do what the strategy inside does."""
        found: MetricRecord | None = self.strategy.aggregate_evaluate(server_round, replies)
        return found
