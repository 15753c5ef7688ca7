"""Rounds in Flower's simulation, with clients that leave; prints JSON.

``rounds.py secure`` has secure aggregation, ``rounds.py streaming`` the other strategy.

Client p's update in round r is `update_of(p, r)`, and its weight `weight_of(p)`.
"""

from __future__ import annotations

import json
import sys
import weakref

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from flwr.simulation import run_simulation

from gpucoll.integrations.flower import SecureAggregation, Streaming, secure_aggregation

KEY = "gpucoll.secure-aggregation"
CLIENTS, CLIP, MAX_WEIGHT = 7, 0.5, 10
LEAVES = [  # of each round, the step before which a client leaves
    {},
    {0: "advertise"},
    {1: "share_keys"},
    {2: "mask"},
    {3: "confirm"},
    {4: "unmask"},
    {0: "share_keys", 4: "mask"},
    {0: "mask", 1: "mask", 2: "mask", 6: "mask"},  # too many: no result
    {0: "advertise", 1: "advertise", 2: "share_keys", 3: "share_keys"},  # before the training
    {2: "unmask", 3: "mask", 5: "confirm"},
]
START = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.float64(2), "n": np.int64(7)}


def update_of(client, server_round):
    """Return what a client adds to the arrays."""
    draw = np.random.default_rng((client, server_round))
    return {
        "a": draw.normal(size=(2, 3)).astype(np.float32),  # half of them are clipped
        "b": np.float64(draw.uniform(-0.4, 0.4)),
        "n": np.int64(0),
    }


def leaving(message, context, call_next):
    """Leave the round before a step."""
    if KEY in message.content:
        step = message.content[KEY]["step"]
        if step == "advertise":
            counted = context.state.get("rounds", MetricRecord({"n": -1}))["n"]
            context.state["rounds"] = MetricRecord({"n": counted + 1})
        leaves = LEAVES[context.state["rounds"]["n"] % len(LEAVES)]
        if leaves.get(context.node_config["partition-id"]) == step:
            if step != "advertise":  # after an exception Flower does not keep the counted round
                raise RuntimeError(f"leaves before {step}")
            return Message(RecordDict({KEY: MetricRecord({"left": 1})}), reply_to=message)
    return call_next(message, context)


IS_SECURE = sys.argv[1:] == ["secure"]
client_app = ClientApp(mods=[leaving, secure_aggregation()] if IS_SECURE else [])


@client_app.train()
def train(message, context):
    """Add the update of this client and round."""
    client = context.node_config["partition-id"]
    assert list(message.content) == ["arrays", "config"]
    if message.content["config"].get("fails") == client:
        raise RuntimeError("this client cannot train")
    arrays, server_round = message.content["arrays"], message.content["config"]["server-round"]
    change = update_of(client, server_round)
    made = {name: Array(np.asarray(array.numpy() + change[name])) for name, array in arrays.items()}
    weight = message.content["config"].get("weight", client + 1)
    metrics = MetricRecord({"num-examples": weight, "loss": float(client)})
    content = RecordDict({"arrays": ArrayRecord(made), "metrics": metrics})
    return Message(content, reply_to=message)


server_app = ServerApp()


@server_app.main()
def main(grid, context):
    """Run the scenarios; print what the arrays were after each round."""
    print("FOUND", json.dumps(secured(grid) if IS_SECURE else streamed(grid)))


def secured(grid):
    """Return the arrays of rounds with secure aggregation."""
    return {
        "secure": run(grid, secure(FedAvg(**ALL)), len(LEAVES)),
        "neighbours": run(grid, secure(FedAvg(**ALL), neighbours=4), len(LEAVES)),
        "adam": run(grid, secure(FedAdam(eta=0.1, **ALL)), len(LEAVES)),
        "refused": run(grid, FedAvg(**ALL), 1),  # without secure aggregation
        "heavy": run(grid, secure(FedAvg(**ALL)), 1, weight=11),  # more than max_weight
        "light": run(grid, secure(FedAvg(**ALL)), 1, weight=0),
    }


def streamed(grid):
    """Return the arrays of rounds of FedAvg, and of the same in a stream."""
    found = {}
    for name, make in (("avg", FedAvg), ("adam", FedAdam)):
        found[name] = [run(grid, strategy, 2, fails=3) for strategy in (make(**ALL), of(make))]
    found["in memory"] = in_memory(grid)
    return found


def of(make):
    """Return a strategy that streams."""
    return Streaming(make(**ALL), poll_s=0.05)


def in_memory(grid):
    """Return how many replies were alive, at most, when another one was asked for."""
    seen, made = [], []

    class Replying:
        """A grid that makes replies when they are asked for."""

        def get_node_ids(self):
            return list(range(1, 31))

        def send_and_receive(self, messages, timeout):
            assert not messages  # of the evaluation
            return []

        def push_messages(self, messages):
            self.asked = {str(number): message for number, message in enumerate(messages)}
            return list(self.asked)

        def pull_messages(self, numbers):
            if numbers == ["7"]:  # of which no reply ever comes
                return []
            seen.append(sum(array() is not None for array in made))
            array = Array(np.ones(10, np.float32))
            made.append(weakref.ref(array))
            content = RecordDict(
                {"arrays": ArrayRecord({"a": array}), "m": MetricRecord({"num-examples": 1})}
            )
            return [Message(content, reply_to=self.asked[numbers[0]])]

    strategy = Streaming(FedAvg(fraction_evaluate=0.0), poll_s=0.05)
    start = ArrayRecord({"a": Array(np.zeros(10, np.float32))})
    mean = strategy.start(Replying(), start, 1, timeout=0.5).arrays
    assert (mean["a"].numpy() == 1).all()
    assert len(seen) == 29
    return max(seen)


ALL = {"min_train_nodes": CLIENTS, "min_available_nodes": CLIENTS, "fraction_evaluate": 0.0}


def secure(strategy, **given):
    """Return a strategy with secure aggregation."""
    given = {"threshold": 4, "poll_s": 0.05, "timeout_s": 60.0, **given}
    return SecureAggregation(strategy, clip=CLIP, max_weight=MAX_WEIGHT, **given)


def run(grid, strategy, rounds, **config):
    """Return the arrays after each round, and the metrics of the training."""
    history = []

    def note(server_round, arrays):
        history.append({k: (str(v.numpy().dtype), v.numpy().tolist()) for k, v in arrays.items()})

    start = ArrayRecord({name: Array(np.asarray(value)) for name, value in START.items()})
    result = strategy.start(
        grid, start, rounds, timeout=60, train_config=ConfigRecord(config), evaluate_fn=note
    )
    metrics = {r: dict(m) for r, m in result.train_metrics_clientapp.items()}
    return {"history": history, "metrics": metrics}


if __name__ == "__main__":
    run_simulation(
        server_app,
        client_app,
        CLIENTS,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": 2, "include_dashboard": False, "logging_level": "error"},
        },
    )
    sys.stdout.flush()
