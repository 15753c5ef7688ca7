"""The command line of ``gpucoll-bench``: nccl-tests' flags where it has them; and its help."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from gpucoll.bench.argument_types import choice, count, factor, peers, seconds, size
from gpucoll.bench.collectives import DTYPE_ALIASES, DTYPES, REDOPS
from gpucoll.bench.patterns import MEASURED, NAME_GROUPS
from gpucoll.bench.peers import PEERS
from gpucoll.bench.rank.arrays import KINDS
from gpucoll.version import __version__

__all__ = ["build_parser"]

DETAILS = """\
A size is that of the larger side, as in nccl-tests: the whole output of all_gather and gather,
the whole input of reduce_scatter, scatter and all_to_all. These have a block for each rank: the
elements are rounded down to a multiple of the ranks, at least one for each. Bus bandwidth has
nccl-tests' factors; where it defines none (scan, exclusive_scan) it is the algorithm bandwidth.

send_recv     every rank to the next, and from the one before, at once
ping_pong     from rank 0 to rank 1 and back; the time is one way's
stream        8 messages from rank 0 to rank 1, then a reply of one element; the time is a message's

Other ranks wait in a barrier meanwhile. In-place forms are measured where a library has them.

What stands in the place of a collective's name, too:

async_...     every collective: started with async_op=True, then waited for
overlap       an all_reduce started, --work milliseconds of NumPy work, then the wait; beside it the
              call ("blocking") and the work alone, and the ratio to the longer of the two. A call
              that goes on meanwhile needs a free CPU: --unpinned, and more CPUs than ranks
overlap_sleep the same with a caller that sleeps, so that its CPU is free
isend_irecv   receive from the rank before and send to the next, both asynchronously; wait for both
probe_recv, recv_unknown
              as ping_pong, received after a probe; without a buffer, of unknown size
broadcast_object, gather_object, scatter_object, all_gather_object
              Python objects that carry so many bytes: a NumPy array from 1K on, bytes below
producer_consumer
              rank 0 gives jobs to the others, one at a time, and takes the results: small objects
startup       a program that says hello, started by the library's own launcher: time, CPU, memory
memory        what a communicator and a duplicate of it take: memory, address space, descriptors

Several of them: async (all of async_...), patterns (all of these); all means every collective.

Arrays on GPUs (--array cupy, torch): a sample ends when the GPU has done its calls. --limit
measures, in turn with the calls, a copy of as many bytes within the GPU of rank 0, which is alone
meanwhile: the row "copy", whose algbw is what it copies a second, and whose busbw what it reads and
writes. "busbw / copy" is the call's busbw over that one: at which part of the memory's bandwidth
its bytes move between ranks; N/A where none do, as with one rank. --backend direct needs no library
of a vendor's, and lets ranks share a GPU.

--array host-device needs no GPU: Host devices (docs/host_device.md) are a test device, made of host
memory and threads. It shows that all of it works and is right; no time of it says anything about a
GPU. Beside it stands gpucoll-numpy: the same calls on NumPy's arrays, in the same memory.

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
  gpucoll-bench all_reduce -b 1K -e 1G --array cupy --symmetric --compare cupy-nccl,torch-nccl
  gpucoll-bench all_reduce -b 1K -e 64M --array cupy --backend direct --ranks 2 --limit
  gpucoll-bench all --array host-device --ranks 2 -e 1M
  python -m gpucoll.bench.report result.json

exit codes: 0 all right; 1 wrong results, or a failure while measuring; 2 nothing was measured
(wrong arguments, a peer that is not there); 130 interrupted
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser, which is also the help text."""
    parser = argparse.ArgumentParser(
        prog="gpucoll-bench",
        description="Measure collectives between the processes of this host, beside their peers, "
        "with the columns and definitions of nccl-tests.",
        epilog=DETAILS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"gpucoll-bench {__version__}")
    add("collectives", nargs="?", default=["all_reduce"],
        type=choice(list(MEASURED), {}, NAME_GROUPS), metavar="COLLECTIVE,...",
        help=f"one or several of {', '.join(MEASURED)}, or {', '.join(NAME_GROUPS)} (all_reduce)"
    )  # fmt: skip
    add(
        "--ranks",
        type=count(1),
        metavar="P",
        help="default: one for each usable CPU, 2 to 8; for each GPU",
    )
    add("-b", dest="first", type=size, default=4, metavar="SIZE", help="smallest size in bytes (4)")
    add("-e", dest="last", type=size, default=64 << 20, metavar="SIZE", help="largest size (64M)")
    step = parser.add_mutually_exclusive_group()
    step.add_argument("-f", dest="factor", type=factor, default=4.0, help="size times this (4)")
    step.add_argument("-i", dest="increment", type=size, metavar="SIZE", help="size plus this")
    add("-d", dest="dtype", type=choice(DTYPES, DTYPE_ALIASES), default=["float32"],
        help="dtype, a comma-separated list, or all (float32)")  # fmt: skip
    add("-o", dest="redop", type=choice(REDOPS, {}), default=["sum"],
        help="reduction, a comma-separated list, or all (sum)")  # fmt: skip
    add("-r", dest="root", type=count(0), default=0, help="root, where there is one (0)")
    add_measuring(add)
    return parser


def add_measuring(add: Callable[..., object]) -> None:
    """Add the options that say how it is measured, beside what, and where the results go."""
    add("-n", dest="reps", type=count(1), metavar="ITERS",
        help="calls in a sample (as many as take --sample)")  # fmt: skip
    add("-w", dest="warmup", type=count(0), metavar="WARMUP",
        help="calls before the first sample (by time, at least 3)")  # fmt: skip
    add("-c", dest="check", type=int, choices=(0, 1), default=1, help="check the results (1)")
    add("--rounds", type=count(1), default=9, help="samples of each case, interleaved (9)")
    add("--sample", type=seconds, default=0.015, metavar="SECONDS",
        help="how long a sample takes where -n is not given (0.015), at least 3 calls")  # fmt: skip
    add("--list", type=count(2), default=1, metavar="N",
        help="N arrays of each size: one call with the list of them beside N calls")  # fmt: skip
    add("--symmetric", action="store_true", help="measure arrays from comm.empty as well")
    add("--plan", action="store_true", help="measure the plan_... of each as well")
    add("--limit", action="store_true",
        help="measure the memory limit, and the fraction reached: streaming in- and output without "
        "other ranks, where both have one size on every rank; on GPUs see above")  # fmt: skip
    add("--torch", action="store_true",
        help="measure PyTorch's tensors on the host as well, and what they cost above NumPy's "
        "arrays")  # fmt: skip
    add("--work", type=seconds, default=2.0, metavar="MILLISECONDS",
        help="how long a rank works beside the call of overlap (2)")  # fmt: skip
    add("--unpinned", action="store_true",
        help="leave ranks to the scheduler (each on a CPU of its own where there are "
        "enough)")  # fmt: skip
    add("--one-cpu", action="store_true",
        help="put gpucoll's ranks on one CPU after they have met, as a scheduler may; beside them "
        "gpucoll-bound, ranks that were bound to it before, as the peers' are")  # fmt: skip
    add("--array", choices=tuple(KINDS), default="numpy",
        help="whose arrays: NumPy's on the host; CuPy's or PyTorch's on GPUs, one for each rank; "
        "those of Host devices, for a test without a GPU (numpy)")  # fmt: skip
    add("--backend", choices=("auto", "mpi", "nccl", "rccl", "direct"), default="auto",
        help="what moves arrays on GPUs (auto); direct lets ranks share a GPU; mpi moves host "
        "arrays, of ranks that mpiexec starts: mpiexec -n 4 gpucoll-bench ...")  # fmt: skip
    add("--compare", type=peers, default={}, metavar="PEER[=PYTHON],...",
        help=f"measure these in the same run: {', '.join(PEERS)}; PYTHON is the Python, or the "
        "folder, of the environment that has it")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the results to this file")
    add("--timeout", type=seconds, default=60.0, metavar="SECONDS",
        help="after so long without an answer a library is given up (60)")  # fmt: skip
