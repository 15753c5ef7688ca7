"""`secure_aggregation`: a mod that makes a ClientApp take part in secure sums."""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod

from gpucoll.errors import SecureSumError
from gpucoll.integrations.flower.records import (
    KEY,
    Task,
    digest_of,
    encoded,
    only_record,
    weight_of,
)


def secure_aggregation(min_clients: int = 3) -> Mod:
    """Return a mod with which a ClientApp shows the server only sums of its updates.

    ``app = ClientApp(mods=[secure_aggregation()])``. The ServerApp has the strategy
    `SecureAggregation`. The mod must be the first, so that it sees what the others have made.
    Messages other than those of training pass unchanged.

    Parameters
    ----------
    min_clients : int
        Of fewer clients in a round, this one refuses to be one. The sum is of those that stay,
        which are more than half: with 3 clients it may be of two.

    Notes
    -----
    A client that must not go on raises an error, which the server gets as an error reply, and then
    counts as having left. It raises SecureSumError if it is asked to train without secure
    aggregation, or if a message is wrong, and ArgumentError if the update does not fit: other
    arrays than it got, a weight above `max_weight`, NaN.

    The state of a round is in the Context, with private keys, until this client's last step; of a
    round that was given up, until the next one.
    """

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        if KEY not in message.content:
            raise SecureSumError(
                "the server asks for training without secure aggregation: this client refuses. The "
                "ServerApp needs the strategy gpucoll.integrations.flower.SecureAggregation"
            )
        given = message.content[KEY]
        del message.content[KEY]
        if given["step"] == "advertise":
            return _advertise(min_clients, given, message, context)
        if KEY not in context.state:
            raise SecureSumError(
                "the server goes on with a round of which this client knows nothing"
            )
        if given["step"] == "mask":
            return _mask(given, message, context, call_next)
        return _answer(given, message, context)

    return mod


def _advertise(min_clients: int, given: Any, message: Message, context: Context) -> Message:
    task = Task.read(given)
    if task.clients < min_clients:
        raise SecureSumError(
            f"a round has {task.clients} clients, and this one wants {min_clients} or more"
        )
    client = task.settings().client(task.client)
    said = client.advertise()
    context.state[KEY] = task.record(state=client.state())
    return _reply(message, ConfigRecord({"message": said}))


def _answer(given: Any, message: Message, context: Context) -> Message:
    kept = context.state[KEY]
    task = Task.read(kept)
    client = task.settings().resume(kept["state"])
    step = given["step"]
    if step not in ("share_keys", "confirm", "unmask"):
        raise SecureSumError(f"the server asks for a step {step!r}, which there is not")
    said = getattr(client, step)(given["message"])
    if step == "unmask":
        del context.state[KEY]  # with the keys of the round
    else:
        context.state[KEY] = task.record(state=client.state())
    return _reply(message, ConfigRecord({"message": said}))


def _mask(given: Any, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Train, and reply with the masked update."""
    kept = context.state[KEY]
    task = Task.read(kept)
    client = task.settings().resume(kept["state"])
    if digest_of(message) != task.content:
        raise SecureSumError(
            "the server sent other arrays, or another configuration, than it announced to all "
            "clients at the start of the round: a sum of updates to different models could show one"
        )
    _, before = only_record(message.content, "array", "a train message")
    before = ArrayRecord(dict(before))  # training may put others into the record
    trained = call_next(message, context)
    if trained.has_error():
        return trained
    _, after = only_record(trained.content, "array", "the reply to a train message")
    vector = encoded(task, before, after, weight_of(task, trained.content))
    said = client.mask(given["message"], vector)
    context.state[KEY] = task.record(state=client.state())
    # As an array: Flower sends large arrays in pieces, but each other record in one.
    return _reply(message, ArrayRecord({"message": Array(np.frombuffer(said, np.uint8))}))


def _reply(message: Message, record: Any) -> Message:
    return Message(RecordDict({KEY: record}), reply_to=message)
