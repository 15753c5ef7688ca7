"""`SecureAggregation`: a strategy around another one, which learns the sum of updates alone."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from logging import getLogger
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from gpucoll.errors import ArgumentError, SecureSumError
from gpucoll.federated.secure_sum import SecureSumServer
from gpucoll.integrations.flower.around import Around
from gpucoll.integrations.flower.records import (
    KEY,
    Task,
    decoded,
    digest_of,
    free_arrays,
    only_record,
)

_log = getLogger("flwr")


@dataclass
class _Round:
    """A round that is under way."""

    task: Task
    server: SecureSumServer
    nodes: list[int]  # the node of each client of the secure sum
    before: ArrayRecord
    grid: Any


class SecureAggregation(Around):
    """A strategy that gets the weighted mean of the clients' updates, and no single update.

    ``strategy = SecureAggregation(FedAvg(...), clip=1.0, max_weight=1000)``. The ClientApp has the
    mod `secure_aggregation`.

    The clients' updates, new arrays minus the arrays that the server sent, are clipped, rounded to
    integers, weighted and added up by `SecureSum`. The strategy inside gets one reply, as if one
    client had all examples: those that work with the mean alone give the same result as without,
    such as FedAvg, FedAvgM, FedProx, FedAdam and FedYogi. Those that compare clients cannot work:
    Krum, the median, trimmed means, QFedAvg, XGBoost's.

    Parameters
    ----------
    strategy : flwr.serverapp.strategy.Strategy
        Chooses clients, makes the new arrays, and does all of the evaluation.
    clip : float
        Each value of an update is clipped to -clip..clip.
    max_weight : float
        The largest weight that a client may have, such as its number of examples.
    threshold : float or int
        How many of a round's clients must stay to its end, as a share or as a number; at least one
        more than half. With `neighbours`, how many of k + 1.
    neighbours : int, optional
        Number k of clients with which each has masks and shares; see `SecureSum`. Default: all.
    weight_key : str, optional
        The metric that is a client's weight. Default: ``strategy.weighted_by_key``.
    timeout_s : float
        How long to wait for the replies in each of the four steps beside the training; for that
        ``start(timeout=)`` counts.
    poll_s : float
        How often to ask for masked updates, of which one is in memory at a time.

    Raises
    ------
    ArgumentError
        An argument is wrong.

    Notes
    -----
    Weights become integers, of which `max_weight` is the largest: (2^31 - 1) / n with n clients.
    The mean differs from that of clipped updates with these weights by at most n * clip / (2 W),
    where W is the sum of the integers: n * clip / 2^32 if all have the weight `max_weight`. Updates
    have 4 bytes a value.

    A client that replies with an error, with a wrong message or too late has left the round. If
    too few are left, there is a warning, the arrays stay as they are, and the next round begins.
    Metrics of training are not sent, since each would show something of its client.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        clip: float,
        max_weight: float,
        threshold: float = 2 / 3,
        neighbours: int | None = None,
        weight_key: str | None = None,
        timeout_s: float = 3600.0,
        poll_s: float = 1.0,
    ) -> None:
        for name, value in (("clip", clip), ("max_weight", max_weight)):
            if not 0 < value < math.inf:
                raise ArgumentError(f"{name} must be a positive number; got {value!r}")
        super().__init__(strategy, poll_s)
        self.threshold, self.neighbours, self.timeout_s = threshold, neighbours, timeout_s
        key = weight_key or str(getattr(strategy, "weighted_by_key", "num-examples"))
        self._task = Task(2, 2, 0, neighbours or 0, 0, 0, float(clip), float(max_weight), key)
        self._round: _Round | None = None

    def summary(self) -> None:
        """Log the settings, and those of the strategy inside."""
        task = self._task
        _log.info("\t├──> Secure aggregation by gpucoll:")
        _log.info("\t│\t├── Updates clipped to ±%s, weights up to %s", task.clip, task.max_weight)
        _log.info(
            "\t│\t└── Threshold: %s, neighbours: %s", self.threshold, self.neighbours or "all"
        )
        super().summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the strategy choose clients, and these exchange keys; return the train messages."""
        self._round = None
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        if not messages:
            return []
        try:
            return self._prepared(messages, arrays, grid)
        except (SecureSumError, ArgumentError) as error:
            _log.warning(
                "Round %s is left out, without secure aggregation: %s", server_round, error
            )
            return []

    def _prepared(self, messages: list[Message], arrays: ArrayRecord, grid: Any) -> list[Message]:
        n_clients = len(messages)
        holders = n_clients if self.neighbours is None else self.neighbours + 1
        threshold = self.threshold
        if isinstance(threshold, float):
            least = holders // 2 + (1 if self.neighbours is None else 2)
            threshold = max(math.ceil(threshold * holders), min(least, holders))
        task = replace(
            self._task,
            clients=n_clients,
            threshold=threshold,
            length=sum(math.prod(array.shape) for array in arrays.values()) + 1,
            round_id=secrets.randbits(63),
            content=_digest_of_all(messages),
        )
        nodes = [message.metadata.dst_node_id for message in messages]
        now = _Round(task, task.settings().server(), nodes, arrays, grid)
        keys = self._exchange(now, "advertise", dict.fromkeys(range(n_clients), b""))
        shares = self._exchange(now, "share_keys", keys)
        self._round = now
        return [_with_step(messages[client], "mask", text) for client, text in shares.items()]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add up masked updates, let the clients unmask the sum, and pass the mean on."""
        now, self._round = self._round, None
        if now is None:
            return None, None
        last = None
        try:
            for reply in replies:
                if _received(now, reply):
                    last = reply
            survivors = now.server.advance()
            confirmations = self._exchange(now, "confirm", survivors)
            self._exchange(now, "unmask", confirmations)
            total = now.server.sum()
        except SecureSumError as error:
            _log.warning("Round %s has no result: %s", server_round, error)
            return None, None
        task = now.task
        mean = decoded(task.clip, now.before, total)
        if mean is None or last is None:
            _log.warning("Round %s has no result: the weights of all clients are 0", server_round)
            return None, None
        _log.info("aggregate_train: %s updates are in the secure sum", len(now.server.included))
        weight = int(total[-1]) / task.levels * task.max_weight
        metrics = MetricRecord({task.weight_key: weight})
        last.content = RecordDict({"arrays": mean, "metrics": metrics})
        made, _ = self.strategy.aggregate_train(server_round, [last])
        return made, MetricRecord({"clients": len(now.server.included), task.weight_key: weight})

    def _exchange(self, now: _Round, step: str, texts: Mapping[int, bytes]) -> dict[int, bytes]:
        """Make a step: send each client its message; return the next ones."""
        messages = []
        for client, text in texts.items():
            task = replace(now.task, client=client)
            more = {"step": step, "message": text}
            record = task.record(**more) if step == "advertise" else ConfigRecord(more)
            content = RecordDict({KEY: record})
            messages.append(Message(content, now.nodes[client], MessageType.TRAIN))
        for reply in now.grid.send_and_receive(messages, timeout=self.timeout_s):
            _received(now, reply)
        return {} if step == "unmask" else now.server.advance()


def _digest_of_all(messages: list[Message]) -> str:
    """Return the digest of what all clients are told to do; strategies share one content."""
    others = {(id(one.content), one.metadata.message_type): one for one in messages}
    digests = {digest_of(one) for one in others.values()}
    if len(digests) > 1:
        raise ArgumentError(
            "in a secure aggregation all clients must get the same arrays and configuration, and "
            "the strategy inside has made different ones"
        )
    return digests.pop()


def _with_step(message: Message, step: str, text: bytes) -> Message:
    """Return a train message with the record of a step; strategies share one content."""
    record = ConfigRecord({"step": step, "message": text})
    message.content = RecordDict({**message.content, KEY: record})
    return message


def _received(now: _Round, reply: Message) -> bool:
    """Hand a reply to the server of the secure sum; log why, if it cannot be used."""
    node = reply.metadata.src_node_id
    problem = ""
    if reply.has_error():
        problem = reply.error.reason.strip()[-300:]  # the end of a traceback
    elif node not in now.nodes:
        problem = "it was not asked"
    else:
        try:
            now.server.receive(_text(reply.content), now.nodes.index(node))
        except Exception as error:  # whatever a client may have sent, the round goes on
            problem = f"{type(error).__name__}: {error}"
        free_arrays(reply.content)
    if problem:
        _log.warning("Node %s has left the secure aggregation: %s", node, problem)
    return not problem


def _text(content: RecordDict) -> Any:
    """Return the bytes that a client sent, in a config record or as an array."""
    record = content.get(KEY)
    if isinstance(record, ConfigRecord):
        return record.get("message")
    _, record = only_record(content, "array", "a reply")
    return record["message"].numpy().data if "message" in record else None
