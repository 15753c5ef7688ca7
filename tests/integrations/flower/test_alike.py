"""Clients of a secure sum refuse to be given different models, clips or configurations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.supercore.task_identity import TaskIdentity

from gpucoll import ArgumentError, SecureSumError
from gpucoll.integrations.flower import SecureAggregation, secure_aggregation
from gpucoll.integrations.flower.records import KEY, Task, decoded, digest_of
from gpucoll.integrations.flower.strategy import _received, _Round

CLIENTS, VICTIM, CLIP = 5, 2, 0.5
STEPS = ("advertise", "share_keys", "mask", "confirm", "unmask")


@pytest.fixture(autouse=True)
def a_task_of_flower(monkeypatch):
    """Messages are made by a task that Flower runs; here there is none."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def train_message(client=0, value=0.0, rate=0.1, message_type=MessageType.TRAIN):
    arrays = ArrayRecord({"a": Array(np.full(3, value))})
    content = {"arrays": arrays, "config": ConfigRecord({"lr": rate, "names": ["x", "y"]})}
    return Message(RecordDict(content), client, message_type)


def update_of(client):
    return np.random.default_rng(client).uniform(-0.4, 0.4, 3)


def trained(message, context):
    """Return what a client that trains replies."""
    before = message.content["arrays"]["a"].numpy()
    arrays = ArrayRecord({"a": Array(before + update_of(context.node_id))})
    content = {"arrays": arrays, "metrics": MetricRecord({"num-examples": 10})}
    return Message(RecordDict(content), reply_to=message)


def mean_of(tasks, messages):
    """Play a round in which each client may be given something else."""
    server, mod = tasks[0].settings().server(), secure_aggregation()
    contexts = [Context(1, client, {}, RecordDict(), {}) for client in range(CLIENTS)]
    inbox = dict.fromkeys(range(CLIENTS), b"")
    for step in STEPS:
        for client, text in inbox.items():
            record = ConfigRecord({"step": step, "message": text})
            if step == "advertise":
                record = tasks[client].record(step=step, message=text)
            message = messages[client] if step == "mask" else train_message(client)
            message.content[KEY] = record
            reply = mod(message, contexts[client], trained).content[KEY]["message"]
            server.receive(reply.numpy().data if step == "mask" else reply)
        inbox = server.advance() if step != STEPS[-1] else {}
    before = messages[0].content["arrays"]
    mean = decoded(CLIP, before, server.sum())
    assert mean is not None
    return mean["a"].numpy()


def tasks_for(message, **of_others):
    """Return tasks of all clients, with other settings for all but one."""
    one = Task(CLIENTS, 3, 4, 0, 77, 0, CLIP, 10.0, "num-examples", digest_of(message))
    return [replace(one, client=c, **({} if c == VICTIM else of_others)) for c in range(CLIENTS)]


def test_clients_that_are_given_the_same_are_in_one_sum():
    messages = [train_message(client) for client in range(CLIENTS)]
    mean = mean_of(tasks_for(messages[0]), messages)
    assert np.allclose(mean, np.mean([update_of(c) for c in range(CLIENTS)], axis=0), atol=1e-8)


@pytest.mark.parametrize("given", [{"clip": 1e30}, {"max_weight": 1e9}, {"content": "other"}])
def test_another_clip_for_all_but_one_does_not_show_its_update(given):
    messages = [train_message(client) for client in range(CLIENTS)]
    with pytest.raises(SecureSumError, match="other settings"):
        mean_of(tasks_for(messages[0], **given), messages)


@pytest.mark.parametrize("given", [{"value": 1.0}, {"rate": 0.0}, {"message_type": "train.none"}])
def test_another_model_or_configuration_for_all_but_one_does_not_show_its_update(given):
    messages = [
        train_message(client, **({} if client == VICTIM else given)) for client in range(CLIENTS)
    ]
    with pytest.raises(SecureSumError, match="other arrays, or another configuration"):
        mean_of(tasks_for(messages[VICTIM]), messages)


def test_the_digest_is_the_same_behind_the_network():
    message = train_message()
    children = {
        record.object_id: type(record).inflate(
            record.deflate(), dict(record.children or {}) or None
        )
        for record in message.content.values()
    }
    arrived = Message(RecordDict.inflate(message.content.deflate(), children), 0, MessageType.TRAIN)
    assert arrived.content["config"] is not message.content["config"]
    assert digest_of(arrived) == digest_of(message)
    assert digest_of(train_message(rate=0.2)) != digest_of(message)
    assert digest_of(train_message(value=1.0)) != digest_of(message)
    two = [("a", Array(np.zeros(2))), ("b", Array(np.zeros(2)))]
    orders = [RecordDict({"arrays": ArrayRecord(dict(order))}) for order in (two, two[::-1])]
    one, other = (digest_of(Message(order, 0, MessageType.TRAIN)) for order in orders)
    assert one != other


def test_a_client_that_sends_no_array_leaves_the_round():
    """Whatever the bytes are, the others go on."""
    (task, *_) = tasks_for(train_message())
    before = ArrayRecord({"a": Array(np.zeros(3))})
    now = _Round(task, task.settings().server(), [1, 2], before, None)
    for data in (b"", b"garbage", b"\x93NUMPY\x01\x00"):
        array = Array("uint8", (3,), "numpy.ndarray", data)
        asked = train_message(1)
        reply = Message(RecordDict({KEY: ArrayRecord({"message": array})}), reply_to=asked)
        assert not _received(now, reply)


def test_a_strategy_that_configures_clients_differently_is_refused():
    class Strategy:
        weighted_by_key = "num-examples"

    around = SecureAggregation(Strategy(), clip=CLIP, max_weight=10)
    messages = [train_message(0), train_message(1, rate=0.2), train_message(2)]
    with pytest.raises(ArgumentError, match="all clients must get the same arrays"):
        around._prepared(messages, messages[0].content["arrays"], None)
