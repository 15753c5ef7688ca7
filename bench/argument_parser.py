"""The command line of ``gpucoll-bench``, with nccl-tests' flags, and its help text."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from gpucoll.bench.argument_types import choice, count, factor, peers, seconds, size
from gpucoll.bench.collectives import DTYPE_ALIASES, DTYPES, REDOPS
from gpucoll.bench.other_names import OTHER_NAMES
from gpucoll.bench.patterns import MEASURED, NAME_GROUPS
from gpucoll.bench.peers import PEERS
from gpucoll.bench.predict.command import add_arguments as add_predicting
from gpucoll.bench.rank.arrays import KINDS
from gpucoll.command_line import OneLineParser

__all__ = ["build_parser"]

DETAILS = """\
A size is that of the larger side, as in nccl-tests: the whole output of all_gather and gather,
the whole input of reduce_scatter, scatter and all_to_all. In these, an array has one block for each
rank, so the number of elements is rounded down to a multiple of the ranks (at least one element a
block). Bus bandwidth uses nccl-tests' factors. For collectives without such a factor (scan,
exclusive_scan) it equals the algorithm bandwidth.

send_recv     every rank sends to the next rank and receives from the previous one, at the same time
ping_pong     a message from rank 0 to rank 1 and back; the time is that of one direction
stream        8 messages from rank 0 to rank 1, then a reply of one element; the time is per message

Ranks without a part in these wait in a barrier. In-place forms are measured if a library has them.

In addition to collectives you can name:

async_...     any collective, started with async_op=True and then waited for
overlap       start an all_reduce, do NumPy work for --work milliseconds, then wait. The call alone
              ("blocking") and the work alone are measured, too, and the ratio of the total to the
              longer of them. A call can only progress during the work if a CPU is free: use
              --unpinned, and more CPUs than ranks
overlap_sleep the same, but the caller sleeps instead of working, so that its CPU is free
isend_irecv   receive from the previous rank and send to the next, both started, then wait for both
probe_recv    ping_pong in which a probe precedes each receive
recv_unknown  ping_pong in which the receive has no buffer, so that the size is unknown
broadcast_object, gather_object, scatter_object, all_gather_object
              Python objects that contain SIZE bytes: bytes below 1K, a NumPy array from 1K on
producer_consumer
              rank 0 sends small jobs to the others, one at a time, and receives the results
startup       start a minimal program with the library's own launcher: time, CPU time, memory
memory        what a communicator and a duplicate of it take: memory, address space, descriptors

Three names stand for several: all (every collective), async (every async_...), and patterns
(everything in this second list).

Names of OSU Micro-Benchmarks and nccl-tests are accepted, such as osu_allreduce, osu_iallreduce,
osu_latency (ping_pong), osu_bw (stream) and all_reduce_perf. A note says what each is here and what
differs. Sizes are nccl-tests': for osu_allgather, osu_alltoall, osu_gather and osu_scatter SIZE
here is OSU's SIZE times the number of ranks.

Arrays on GPUs (--array cupy, torch): a sample ends when the GPU has completed its calls. --limit
also measures a copy of the same size within the GPU of rank 0 while the other ranks are idle; the
copies take turns with the calls. In its row, "copy", algbw counts the bytes copied and busbw those
read and written. "busbw / copy" divides the call's busbw by the copy's: the fraction of the
memory's bandwidth at which bytes move between ranks (N/A if none do, as with one rank). --backend
direct needs no vendor's library, and lets ranks share a GPU.

--array host-device needs no GPU. Host devices (docs/host_device.md) are a test device made of host
memory and threads. They show that everything works and that results are right, but their times are
meaningless for GPUs. gpucoll-numpy is measured for comparison: the same calls on NumPy arrays.

examples:
  gpucoll-bench
  gpucoll-bench all_reduce --ranks 4 -b 4 -e 64M -f 4 -d float32 -o sum --symmetric --limit
  gpucoll-bench all_reduce --list 500 -b 4K -e 4K
  gpucoll-bench all --ranks 2 -f 16 --compare mpich=/envs/mpich,gloo=/envs/gloo --json result.json
  gpucoll-run -n 4 -m gpucoll.bench all_reduce,broadcast -d bfloat16,float16
  gpucoll-bench async_all_reduce,isend_irecv,probe_recv -b 8 -e 80 -f 10 --compare mpich
  gpucoll-bench overlap -b 4M -e 4M --work 2 --unpinned --compare mpich
  gpucoll-bench broadcast_object -b 100 -e 20000000 -f 200000 --compare mpich
  gpucoll-bench all_reduce -b 8 -e 8 --torch
  gpucoll-bench startup,memory --ranks 4 --compare mpich
  gpucoll-bench all_reduce -e 64K --percentiles --compare mpich --csv result.csv
  gpucoll-bench all_reduce -b 1K -e 1G --array cupy --symmetric --compare cupy-nccl,torch-nccl
  gpucoll-bench all_reduce -b 1K -e 64M --array cupy --backend direct --ranks 2 --limit
  gpucoll-bench all_reduce,broadcast --limit --compare mpich=/envs/mpich --plot calls.svg
  gpucoll-bench all --array host-device --ranks 2 -e 1M
  gpucoll-bench all_reduce --predict 64,1024,10000 --hosts-of 8 --link 25,10
  gpucoll-bench --predict 64 --hosts-of 1 --from measured_on_4_hosts.json
  gpucoll-bench report result.json --html result.html
  gpucoll-bench compare before.json after.json
  gpucoll-bench all_reduce --predict 64,1024,10000 --hosts-of 8 --link 25,10
  gpucoll-bench --predict 64 --hosts-of 1 --from measured_on_4_hosts.json

exit codes: 0 success; 1 wrong results, or a failure while measuring; 2 nothing was measured (wrong
arguments, or a missing peer); 130 interrupted
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser, which contains the help text."""
    parser = OneLineParser(
        prog="gpucoll-bench",
        description="Measure collectives between processes of this host, and compare with other\n"
        "libraries. The columns and definitions are those of nccl-tests.",
        epilog=DETAILS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("collectives", nargs="*", default=[["all_reduce"]],
        type=choice(list(MEASURED), {}, NAME_GROUPS, list(OTHER_NAMES)), metavar="COLLECTIVE",
        help="one or more, separated by commas or spaces, of "
        f"{', '.join([*MEASURED, *NAME_GROUPS])} (default: all_reduce)"
    )  # fmt: skip
    add(
        "--ranks",
        type=count(1),
        metavar="P",
        help="number of ranks (default: one per usable CPU, 2 to 8, or one per GPU)",
    )
    add("-b", dest="first", type=size, default=4, metavar="SIZE", help="smallest size in bytes (4)")
    add("-e", dest="last", type=size, metavar="SIZE", help="largest size (64M, or that of -b)")
    step = parser.add_mutually_exclusive_group()
    step.add_argument(
        "-f",
        dest="factor",
        type=factor,
        default=4.0,
        help="multiply the size by this at each step (4)",
    )
    step.add_argument(
        "-i", dest="increment", type=size, metavar="SIZE", help="add this to the size at each step"
    )
    add("-d", dest="dtype", type=choice(DTYPES, DTYPE_ALIASES), default=["float32"],
        help="dtype, a comma-separated list, or all (float32)")  # fmt: skip
    add("-o", dest="redop", type=choice(REDOPS, {}), default=["sum"],
        help="reduction, a comma-separated list, or all (sum)")  # fmt: skip
    add(
        "-r",
        dest="root",
        type=count(0),
        default=0,
        help="root rank, for collectives with a root (0)",
    )
    add_measuring(add)
    add_predicting(add)
    return parser


def add_measuring(add: Callable[..., object]) -> None:
    """Add the options for the method, the libraries to compare with, and the output."""
    add("-n", dest="reps", type=count(1), metavar="ITERS",
        help="calls in a sample (as many as fit into --sample)")  # fmt: skip
    add("-w", dest="warmup", type=count(0), metavar="WARMUP",
        help="calls before the first sample (chosen by time, at least 3)")  # fmt: skip
    add("-c", dest="check", type=int, choices=(0, 1), default=1, help="check the results (1)")
    add("--rounds", type=count(1), default=9, help="samples of each case, interleaved (9)")
    add("--sample", type=seconds, default=0.015, metavar="SECONDS",
        help="duration of a sample without -n (0.015); it has at least 3 calls")  # fmt: skip
    add("--percentiles", action="store_true",
        help="also time calls one by one: p50 and p99 in the table; p90 and the largest time in "
        "JSON and CSV, too")  # fmt: skip
    add("--list", type=count(2), default=1, metavar="N",
        help="measure one call on a list of N arrays, and N calls on one array each")  # fmt: skip
    add("--symmetric", action="store_true", help="also measure arrays from comm.empty")
    add("--plan", action="store_true", help="also measure the plan_... of each collective")
    add("--limit", action="store_true",
        help="also measure the memory limit, and the fraction of it that is reached: stream input "
        "and output without other ranks (if sizes are equal on all ranks; GPUs: "
        "below)")  # fmt: skip
    add("--torch", action="store_true",
        help="also measure PyTorch's tensors on the host, and their extra cost")  # fmt: skip
    add("--work", type=seconds, default=2.0, metavar="MILLISECONDS",
        help="how long a rank works during the call of overlap (2)")  # fmt: skip
    add("--unpinned", action="store_true",
        help="let the scheduler place ranks (default: each on a CPU of its own, if there are "
        "enough)")  # fmt: skip
    add("--one-cpu", action="store_true",
        help="move gpucoll's ranks to one CPU after they have met, as a scheduler may do; also "
        "measure gpucoll-bound, whose ranks are bound to it from the start, as peers' "
        "are")  # fmt: skip
    add("--array", choices=tuple(KINDS), default="numpy",
        help="kind of arrays: NumPy's on the host; CuPy's or PyTorch's on GPUs, one for each rank; "
        "those of Host devices, for tests without a GPU (numpy)")  # fmt: skip
    add("--backend", choices=("auto", "mpi", "nccl", "rccl", "oneccl", "direct"), default="auto",
        help="backend for arrays on GPUs (auto); direct lets ranks share a GPU; mpi is for host "
        "arrays, with ranks that mpiexec starts: mpiexec -n 4 gpucoll-bench ...")  # fmt: skip
    add("--compare", type=peers, default={}, metavar="PEER[=PYTHON],...",
        help=f"compare with these in the same run: {', '.join(PEERS)}; PYTHON is the Python "
        "of the environment that has the peer, or its folder")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the results to this file")
    add("--csv", type=Path, metavar="FILE",
        help="write them as CSV, a line for each library, size and side; - prints that instead of "
        "the table")  # fmt: skip
    add("--plot", type=Path, metavar="FILE.svg|png|pdf",
        help="draw time and bus bandwidth over the size into this file; needs matplotlib: "
        "pip install 'gpucoll[plot]'")  # fmt: skip
    add("--html", type=Path, metavar="FILE",
        help="write a page with pictures, ratios and all times into this file; needs "
        "matplotlib")  # fmt: skip
    add("--progress", action="store_true",
        help="without a terminal, too, show how far the run is: a line on stderr every 30 "
        "s")  # fmt: skip
    add("--timeout", type=seconds, default=60.0, metavar="SECONDS",
        help="give a library up after this time without an answer (60)")  # fmt: skip
