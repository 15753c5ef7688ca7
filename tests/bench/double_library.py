"""A library for the bench to measure that is none: its ranks meet in named pipes, at rank 0.

A rank takes it when it is told this file's path instead of a library's name. ``BENCH_DOUBLE`` in
the environment, ``fault:rank``, makes one rank of it misbehave in its first call.
"""

from __future__ import annotations

import os
import signal
from functools import reduce
from pathlib import Path

import numpy as np

from gpucoll.bench.rank.arrays import HostArrays
from gpucoll.bench.rank.inputs import FOLDS, plain
from gpucoll.bench.rank.loops import timed


def join(rank, world_size, store):
    return Double(rank, world_size, Path(store or os.environ["BENCH_DOUBLE_STORE"]))


class Double:
    arrays = HostArrays()

    def __init__(self, rank, world_size, store):
        self.rank = rank
        self.world_size = world_size
        self.reduce_scatter_block = rank
        fault, _, where = os.environ.get("BENCH_DOUBLE", "").partition(":")
        self.fault = fault if where == str(rank) else ""
        if self.fault == "absent":
            raise RuntimeError("this rank does not want to join")
        # Opening a pipe waits for the other side: that is the rendezvous.
        others = range(1, world_size) if rank == 0 else [rank]
        self.ups, self.downs = [], []
        for other in others:
            paths = [store.with_name(f"{store.name}.{way}.{other}") for way in ("up", "down")]
            for path in paths:
                try:
                    os.mkfifo(path)
                except FileExistsError:
                    pass
            self.ups.append(paths[0].open("rb" if rank == 0 else "wb", buffering=0))
            self.downs.append(paths[1].open("wb" if rank == 0 else "rb", buffering=0))

    def versions(self):
        return {"library": "Double 1.0"}

    def allocate(self, placement, count, dtype):
        return np.empty(count, dtype)

    def loop(self, call):
        if call.variant == "limit":
            return timed(
                "move()", move=lambda: np.add(call.source, call.source, out=call.destination)
            )
        if call.collective == "barrier":
            return timed("barrier()", barrier=self.barrier)
        if call.source is None:
            return Jobs(self)
        if call.variant == "work":
            return timed("pass")
        pieces = call.pieces()
        if call.variant == "fused":
            pieces = [call]
        return timed(
            "for piece in pieces: collective(piece)", pieces=pieces, collective=self.collective
        )

    def collective(self, call):
        self.misbehave()
        result = result_of(call, self.exchange(call.source), self.rank)
        if result is not None:
            call.destination[:] = result
            if self.fault == "wrong":
                call.destination[-1] += 1

    def path(self):
        return ""

    def barrier(self):
        self.exchange(np.zeros(1, np.uint8))

    def exchange(self, mine):
        """Return every rank's array."""
        if self.rank:
            self.ups[0].write(mine.tobytes())
            everything = read(self.downs[0], mine.nbytes * self.world_size)
        else:
            everything = mine.tobytes() + b"".join(read(up, mine.nbytes) for up in self.ups)
            for down in self.downs:
                down.write(everything)
        return np.frombuffer(everything, mine.dtype).reshape(self.world_size, -1)

    def misbehave(self):
        if self.fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "raise":
            print("a last word on standard output", flush=True)
            raise ValueError("this rank has no wish to reduce")
        if self.fault == "hang":
            signal.pause()

    def close(self):
        for pipe in (*self.ups, *self.downs):
            pipe.close()


class Jobs:
    """What counts itself how much is wrong."""

    def __init__(self, double):
        self.double = double
        self.wrong = 0

    def __call__(self, reps):
        self.wrong = 2 * (self.double.fault == "wrong")
        return timed("barrier()", barrier=self.double.barrier)(reps)


def result_of(call, inputs, rank):
    """Return a rank's result, or None where it gets none."""
    ranks, name, at_root = len(inputs), plain(call.collective), call.root == rank

    def block_of(whole):
        return whole.reshape(ranks, -1)[rank]

    if name in ("ping_pong", "stream"):
        is_sent_to = rank == 1 or (rank == 0 and name == "ping_pong")
        return inputs[1 - rank] if is_sent_to else None
    if name == "exclusive_scan" and rank == 0:
        return None
    results = {
        "all_reduce": lambda: fold(inputs, call.redop),
        "reduce": lambda: fold(inputs, call.redop) if at_root else None,
        "reduce_scatter": lambda: block_of(fold(inputs, call.redop)),
        "scan": lambda: fold(inputs[: rank + 1], call.redop),
        "exclusive_scan": lambda: fold(inputs[:rank], call.redop),
        "broadcast": lambda: inputs[call.root],
        "scatter": lambda: block_of(inputs[call.root]),
        "all_gather": lambda: inputs.ravel(),
        "gather": lambda: inputs.ravel() if at_root else None,
        "all_to_all": lambda: np.concatenate([block_of(one) for one in inputs]),
        "send_recv": lambda: inputs[rank - 1],
    }
    return results[name]()


def fold(inputs, redop):
    folded = reduce(FOLDS[redop], inputs)
    if redop == "avg":
        folded = folded // len(inputs) if folded.dtype.kind in "iu" else folded / len(inputs)
    return folded.astype(inputs[0].dtype)


def read(pipe, size_bytes):
    parts = []
    while size_bytes:
        part = pipe.read(size_bytes)
        if not part:
            raise EOFError("the other side of the pipe is gone")
        parts.append(part)
        size_bytes -= len(part)
    return b"".join(parts)
