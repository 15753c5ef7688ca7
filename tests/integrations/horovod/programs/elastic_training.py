"""Elastic training over Horovod's names and NumPy, whose result shows every step lost or repeated.

    gpucoll-run --elastic 2:4 -m gpucoll.integrations.horovod elastic_training.py STEPS RANK:STEP...

Each rank prints its process, the number of changes of ranks until then, and how many ranks there
are. If a file named by STOP exists, all ranks stop after the same step.

In each step every rank gives its part of a sum that depends on the step and not on the number of
ranks. So the weights at the end are those of one process, whoever was lost on the way. Rank RANK
of those that were started first kills itself in step STEP. The last line of rank 0 is a JSON
object, whose sizes are pairs: a number of ranks, and how many steps they made.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from horovod.common import basics as hvd
from horovod.common.elastic import ObjectState, run
from horovod.common.exceptions import HorovodInternalError

from gpucoll.integrations.horovod.engine.numpy_arrays import NumpyArrays
from gpucoll.integrations.horovod.engine.request import Kind, Request
from gpucoll.integrations.horovod.job import job
from gpucoll.integrations.horovod.objects import broadcast_object

PARTS = 12
LIBRARY = NumpyArrays()


def allreduce(x, name):
    """Return the sum over the ranks."""
    request = Request(Kind.ALLREDUCE, name, LIBRARY, [x])
    hvd.engine_of(0).run(request)
    return request.results[0]


def gradient(weights, step, part):
    """Return one part of a step's gradient; integers, so that sums are exact in any order."""
    return (weights + step * 7 + part) % 1009


def updated(weights, total):
    return (weights + total) % 100_003


def alone(steps):
    """Return the weights of one process."""
    weights = np.arange(8.0)
    for step in range(steps):
        weights = updated(weights, sum(gradient(weights, step, part) for part in range(PARTS)))
    return weights


def main():
    steps = int(sys.argv[1])
    deadly = dict(map(int, pair.split(":")) for pair in sys.argv[2:])
    hvd.init()
    is_new = "GPUCOLL_JOIN" in os.environ
    dies_in = None if is_new else deadly.get(hvd.rank())
    state = ObjectState(broadcast_object, hvd.rank, step=0, weights=np.arange(8.0), sizes=())
    resets = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    stop = Path(os.environ.get("STOP", "/nonexistent"))

    @run
    def train(state):
        # in one piece, even without a buffer: ranks share a pipe, and may be killed meanwhile
        sys.stdout.write(f"member {os.getpid()} {job.world.epoch} {hvd.size()}\n")
        sys.stdout.flush()
        while state.step < steps:
            mine = range(hvd.rank(), PARTS, hvd.size())
            part = sum((gradient(state.weights, state.step, p) for p in mine), np.zeros(8))
            part = np.append(part, hvd.rank() == 0 and stop.exists())
            if state.step == dies_in:
                print(f"killed {time.time()}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                total = allreduce(part, f"step {state.step}")
            except HorovodInternalError as error:
                print(f"noticed {time.time()} {error}", flush=True)
                raise
            state.weights = updated(state.weights, total[:8])
            state.sizes = (*state.sizes, hvd.size())
            state.step += 1
            state.commit()
            if total[8]:
                break
            pause = float(os.environ.get("PAUSE_S", "0"))
            if pause:
                time.sleep(pause)
        return state.weights

    weights = train(state)
    everyone = job.world.all_gather_object(weights.tolist())
    if hvd.rank() == 0:
        same = all(each == everyone[0] for each in everyone)
        right = same and everyone[0] == alone(state.step).tolist()
        sizes = [(size, len([*same])) for size, same in itertools.groupby(state.sizes)]
        print(json.dumps({"right": right, "sizes": sizes, "resets": len(resets)}))
    hvd.shutdown()


if __name__ == "__main__":
    main()
