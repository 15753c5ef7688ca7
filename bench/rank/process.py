"""The process around a session: joins the library's ranks, then answers over a socket."""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import signal
import socket
import traceback
from typing import Any

from gpucoll.bench.rank.library import Library
from gpucoll.bench.rank.session import Session

__all__ = ["main"]

RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
"""Variables in which mpiexecs pass this rank's number, before MPI is initialised."""

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Run one rank until the driver sends ``finish`` or is gone."""
    options = parse(arguments)
    end_with_parent()
    # Only the driver handles Ctrl-C: it tells the ranks to end in an orderly way.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank = options.rank if options.rank is not None else rank_from_environment()
    if options.cpus:
        # Before the library starts, because it reads the affinity mask and may start threads.
        cpus = [int(cpu) for cpu in options.cpus.split(",")]
        os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + options.connect)
        say(connection, {"pid": os.getpid(), "rank": rank})
        try:
            library = join(options, rank)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            say(connection, {"error": text, "traceback": traceback.format_exc()})
            raise
        serve(connection, Session(library))
        library.close()
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return what the driver passed."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--library",
        required=True,
        help="gpucoll, mpi, gloo, cupy-nccl, torch-nccl, or a Python file",
    )
    parser.add_argument("--connect", required=True, help="name of the driver's abstract socket")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--cpus", default="", help="CPU of rank 0, of rank 1...; empty for any CPU")
    parser.add_argument("--store", default="", help="file through which a library's ranks meet")
    parser.add_argument("--array", default="numpy", help="kind of arrays: numpy, cupy or torch")
    parser.add_argument("--backend", default="auto", help="backend for arrays on GPUs")
    parser.add_argument("--timeout-s", type=float, default=60.0)
    return parser.parse_args(arguments)


def end_with_parent() -> None:
    """Make the kernel kill this rank when the process that started it ends, for whatever reason."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def rank_from_environment() -> int:
    """Return this rank's number from its mpiexec's variables, or 0."""
    for name in RANK_VARIABLES:
        if name in os.environ:
            return int(os.environ[name])
    return 0


def join(options: argparse.Namespace, rank: int) -> Library:
    """Start the library and join its other ranks."""
    if options.library == "gpucoll":
        from gpucoll.bench.rank.own import joined

        return joined(options.array, rank, options.timeout_s, options.backend)
    if options.library == "mpi":
        from gpucoll.bench.rank.message_passing import MessagePassing

        return MessagePassing()
    place = (rank, options.world_size, options.store, options.timeout_s)
    if options.library == "gloo":
        from gpucoll.bench.rank.torch_distributed import Gloo

        return Gloo(*place)
    if options.library == "torch-nccl":
        from gpucoll.bench.rank.torch_distributed import TorchNccl

        return TorchNccl(*place)
    if options.library == "cupy-nccl":
        from gpucoll.bench.rank.cupy_nccl import CupyNccl

        return CupyNccl(*place)
    spec = importlib.util.spec_from_file_location("library_from_file", options.library)
    assert spec is not None, options.library
    assert spec.loader is not None, options.library
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    library: Library = module.join(rank, options.world_size, options.store)
    return library


def say(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one line of JSON."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def serve(connection: socket.socket, session: Session) -> None:
    """Answer commands until ``finish`` arrives or the driver is gone.

    It waits in a blocking read, so a rank takes no CPU time while another library is measured.
    """
    say(connection, session.describe())
    with connection.makefile("rb") as lines:
        for line in lines:
            command = json.loads(line)
            if command["do"] == "finish":
                session.release()
                return
            say(connection, session.answer(command))
