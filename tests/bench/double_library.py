"""A library for the bench to measure that is none: its ranks meet in named pipes, rank 0 reduces.

A rank takes it when it is told this file's path instead of a library's name. ``BENCH_DOUBLE`` in
the environment, ``fault:rank``, makes one rank of it misbehave in its first call.
"""

from __future__ import annotations

import os
import signal
import time
from functools import reduce
from pathlib import Path

import numpy as np

from gpucoll.bench.rank.inputs import FOLDS


def join(rank, world_size, store):
    return Double(rank, world_size, Path(store or os.environ["BENCH_DOUBLE_STORE"]))


class Double:
    def __init__(self, rank, world_size, store):
        self.rank = rank
        self.world_size = world_size
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
            return self.timed(lambda: np.add(call.source, call.source, out=call.destination))
        if call.collective == "barrier":
            return self.timed(self.barrier)
        if call.collective == "broadcast":
            return self.timed(lambda: self.broadcast(call))
        return self.timed(lambda: self.all_reduce(call))

    def timed(self, function):
        def run(reps):
            started = time.perf_counter()
            for _ in range(reps):
                function()
            return time.perf_counter() - started

        return run

    def all_reduce(self, call):
        self.misbehave()
        call.destination[:] = self.exchange(call.source, lambda inputs: fold(inputs, call.redop))
        if self.fault == "wrong":
            call.destination[-1] += 1

    def broadcast(self, call):
        call.destination[:] = self.exchange(call.source, lambda inputs: inputs[call.root])

    def barrier(self):
        self.exchange(np.zeros(1, np.uint8), lambda inputs: inputs[0])

    def exchange(self, mine, fold):
        if self.rank:
            self.ups[0].write(mine.tobytes())
            return np.frombuffer(read(self.downs[0], mine.nbytes), mine.dtype)
        given = [np.frombuffer(read(up, mine.nbytes), mine.dtype) for up in self.ups]
        result = fold([mine, *given])
        for down in self.downs:
            down.write(result.tobytes())
        return result

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
