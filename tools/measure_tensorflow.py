"""What a collective costs in TensorFlow: ``python tools/measure_tensorflow.py [--ranks 2]``.

Starts the ranks itself, with the Python that runs it, which needs TensorFlow. The ways take turns,
in one run, so that all see the same machine. Each line has the least mean of several rounds, in
microseconds: TensorFlow's own ``x * 2``, an all_reduce of gpucoll's, the way through NumPy
(`tf.numpy_function` in functions), and TensorFlow's own CollectiveReduceV2, a ring over gRPC.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import gpucoll

SIZES = {"4 KB": (1 << 10, 2000), "1 MB": (1 << 18, 20), "4 MB": (1 << 20, 8)}
"""Elements of float32, and calls of a turn: a rank whose CPU was taken sleeps in 1000 waits."""
ROUNDS = 3
Way = Callable[[Any], Any]


def ring(comm: gpucoll.Communicator) -> Way:
    """Return TensorFlow's own all_reduce, after connecting the ranks as it wants."""
    import tensorflow as tf
    from tensorflow.core.protobuf import tensorflow_server_pb2
    from tensorflow.python.eager import context
    from tensorflow.python.ops import gen_collective_ops

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        mine = f"127.0.0.1:{taken.getsockname()[1]}"
    cluster = tf.train.ClusterSpec({"worker": comm.all_gather_object(mine)})
    context.context().configure_collective_ops(collective_leader="/job:worker/replica:0/task:0")
    server = tensorflow_server_pb2.ServerDef(
        cluster=cluster.as_cluster_def(),
        default_session_config=context.context().config,
        job_name="worker",
        task_index=comm.rank,
        protocol="grpc",
    )
    context.context().enable_collective_ops(server)
    device = f"/job:worker/replica:0/task:{comm.rank}/device:CPU:0"

    def all_reduce(x: Any) -> Any:
        with tf.device(device):
            return gen_collective_ops.collective_reduce_v2(
                x,
                group_size=comm.world_size,
                group_key=1,
                instance_key=x.shape[0],  # one for each shape
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
                communication_hint="ring",
            )

    return all_reduce


def ways(comm: gpucoll.Communicator) -> dict[str, Way]:
    """Return functions of a tensor."""
    import tensorflow as tf

    from gpucoll.integrations import tensorflow as gct

    def double(x: Any) -> Any:
        return x * 2

    def ours(x: Any) -> Any:
        return gct.all_reduce(x, comm=comm)

    def through_numpy(x: Any) -> Any:
        return tf.convert_to_tensor(comm.all_reduce(x.numpy()))

    def numpy_function(x: Any) -> Any:
        return tf.numpy_function(comm.all_reduce, [x], x.dtype)

    own = ring(comm)
    traced, compiled = tf.function, tf.function(jit_compile=True)
    return {
        "eager: x * 2": double,
        "eager: gpucoll": ours,
        "eager: through NumPy": through_numpy,
        "eager: CollectiveReduceV2": own,
        "tf.function: x * 2": traced(double),
        "tf.function: gpucoll": traced(ours),
        "tf.function: numpy_function": traced(numpy_function),
        "tf.function: CollectiveReduceV2": traced(own),
        "jit_compile: x * 2": compiled(double),
        "jit_compile: gpucoll": compiled(ours),
    }


def be_rank() -> None:
    """Measure every way; rank 0 prints."""
    import tensorflow as tf

    with gpucoll.init() as comm:
        calls = ways(comm)
        for size, (count, n_calls) in SIZES.items():
            x = tf.ones([count])
            best = dict.fromkeys(calls, float("inf"))
            for _ in range(ROUNDS):
                for name, call in calls.items():
                    call(x)
                    comm.barrier()
                    begin = time.perf_counter()
                    for _ in range(n_calls):
                        call(x)
                    best[name] = min(best[name], (time.perf_counter() - begin) / n_calls)
            if comm.rank == 0:
                for name, seconds in best.items():
                    print(f"{size}  {name:34} {seconds * 1e6:9.1f} us", flush=True)


def main() -> int:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank:
        be_rank()
        return 0
    command = [sys.executable, "-m", "gpucoll", "run", "--no-prefix", "-n", str(chosen.ranks)]
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([*command, __file__, "--rank"], env=quiet, timeout=300, check=False)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
