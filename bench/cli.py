"""The command ``gpucoll-bench``."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from gpucoll import config
from gpucoll.bench import environment, launched, table
from gpucoll.bench.arguments import Options, parse
from gpucoll.bench.gpus import check_installed, ranks_on_gpus
from gpucoll.bench.groups import Group, GroupError, ProcessGroup
from gpucoll.bench.measure import Bench
from gpucoll.bench.peers import LocatedPeer, PeerMissingError, locate
from gpucoll.bench.rank.arrays import NoGpuError
from gpucoll.bench.rank.inputs import STORAGE
from gpucoll.bench.rank.own import joined
from gpucoll.bench.results import Results, Row
from gpucoll.bench.starts import cpus_of_ranks, own_group, peer_group
from gpucoll.errors import GpucollError
from gpucoll.rendezvous import launchers
from gpucoll.topology import usable_cpu_count
from gpucoll.transport.shared.layout import MAX_RANKS

__all__ = ["main"]

EXIT_RIGHT = 0
EXIT_WRONG = 1  # wrong results, or a failure while measuring
EXIT_USAGE = 2  # nothing was measured
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

START_S = 60.0  # for a library's ranks to meet: a first import from a cold disk takes long

MEMORY_MARGIN = 0.9  # of what is available: buffers of the libraries themselves come on top


class CannotMeasureError(Exception):
    """Nothing can be measured this way; the message says why, and what to do."""


class CannotWriteError(Exception):
    """The table cannot be written; the message says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = parse(arguments)
    try:
        with terminated_like_interrupted():
            if under_launcher(os.environ):
                return run_launched(options)
            return run_alone(options)
    except (CannotMeasureError, NoGpuError, PeerMissingError) as error:
        complain(str(error))
        return EXIT_USAGE
    except (GroupError, GpucollError) as error:
        complain(str(error))
        return EXIT_WRONG
    except CannotWriteError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        complain(f"cannot write the results: {error}")
        return EXIT_WRONG
    except KeyboardInterrupt:
        complain("interrupted; every rank was ended")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Who reads the table has had enough. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_WRONG


def run_alone(options: Options) -> int:
    """Start the ranks of every library, measure, end them."""
    on_gpus = options.array != "numpy"
    ranks = options.ranks or min(max(usable_cpu_count(), 2), 8)
    if on_gpus:
        ranks = ranks_on_gpus(options.array, options.ranks)
    check_ranks(options, ranks)
    check_dtypes(options)
    check_json_path(options.json_path)
    located = [locate(name, place) for name, place in options.compare.items()]
    if not on_gpus:
        check_memory(options, ranks, len(located))
    compile_kernels()
    cpus = [] if on_gpus else cpus_of_ranks(ranks)  # the vendors' libraries have threads
    with ExitStack() as stack:
        peers = start_peers(options, located, ranks, cpus, stack) if located else []
        own = own_group(ranks, cpus, options.timeout_s, options.array)
        stack.callback(own.close)
        own.join(max(options.timeout_s, START_S))
        return measure(options, own, [*peers], cpus)


def run_launched(options: Options) -> int:
    """Measure with the ranks that a launcher has started; only rank 0 speaks."""
    check_installed(options.array)
    library = joined(options.array, config.local_rank(), options.timeout_s)
    with library.comm as comm:
        try:
            check_launched(options, comm.world_size)
        except CannotMeasureError:
            if comm.rank:
                return EXIT_USAGE
            raise
        if comm.rank:
            launched.follow(comm, library)
            return EXIT_RIGHT
        with ExitStack() as stack:
            own = launched.LaunchedGroup(comm, library)
            stack.callback(own.close)
            return measure(options, own, [], own.cpus)


def start_peers(
    options: Options,
    located: list[LocatedPeer],
    ranks: int,
    cpus: list[int],
    stack: ExitStack,
) -> list[ProcessGroup]:
    """Start all peers at once, then wait for each; what has been started is on the stack."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gpucoll-bench-"))
    groups = []
    for one in located:
        group = peer_group(one, ranks, cpus, options.timeout_s, Path(folder))
        stack.callback(group.close)
        groups.append(group)
    for one, group in zip(located, groups, strict=True):
        try:
            group.join(max(options.timeout_s, START_S))
        except GroupError as error:
            raise CannotMeasureError(
                f"{error}\n{one.name} ({one.python}) does not start"
            ) from error
        if one.peer.signature not in group.versions["library"]:
            raise CannotMeasureError(
                f"{one.name}: the MPI of {one.python} is another one: {group.versions['library']}"
            )
    return groups


def measure(options: Options, own: Group, peers: list[Group], cpus: list[int]) -> int:
    """Measure one collective after the other, printing as it goes; return the exit code."""
    described = environment.describe(options, own.ranks, cpus, [own, *peers])
    results = Results(described)

    def report(rows: list[Row], limit: Row | None) -> None:
        say(table.lines_of_size(rows, limit))

    if options.left_out:
        names = ", ".join(options.left_out)
        note(f"left out of -d all: {names}, which need ml_dtypes: pip install ml_dtypes")
    for number, one in enumerate(options.each()):
        say(table.header(one, own.ranks, None if number else described))
        Bench(one, own, peers, results, report, complain, note).run()
    say(table.footer(results))
    if options.json_path is not None:
        results.write(options.json_path)
    return EXIT_WRONG if results.wrong or results.failures else EXIT_RIGHT


def say(lines: Iterator[str]) -> None:
    """Print lines, at once even into a pipe."""
    for line in lines:
        try:
            print(line, flush=True)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise CannotWriteError(error.strerror) from error


def note(text: str) -> None:
    """Print a line beside the results."""
    say(iter([f"# {text}"]))


def complain(text: str) -> None:
    """Print what went wrong."""
    print(f"gpucoll-bench: {text}", file=sys.stderr, flush=True)


def compile_kernels() -> None:
    """Compile the kernels if they are not in the cache, saying so: it takes seconds."""
    from gpucoll.backends.precompile import ensure_compiled

    try:
        ensure_compiled(report=lambda line: print(f"# {line}", file=sys.stderr, flush=True))
    except (subprocess.CalledProcessError, GpucollError) as error:
        raise CannotMeasureError(f"the kernels do not compile here: {error}") from error


def under_launcher(variables: Mapping[str, str]) -> bool:
    """Return whether a launcher has started this process as one rank of a job."""
    if config.WORLD_SIZE in variables or {"RANK", "WORLD_SIZE"} <= variables.keys():
        return True
    started = launchers.find()  # a task alone may well be a shell: see there
    return started is not None and started.world_size > 1


def check_launched(options: Options, ranks: int) -> None:
    """Refuse what the ranks of a launcher cannot do."""
    if options.compare:
        raise CannotMeasureError(
            "--compare starts the ranks of every library itself, and these have been started by a "
            "launcher: run gpucoll-bench --ranks P --compare ... without one"
        )
    if options.ranks not in (None, ranks):
        raise CannotMeasureError(
            f"--ranks {options.ranks}: the launcher has started {ranks} ranks; leave --ranks out, "
            "or start as many"
        )
    check_ranks(options, ranks)
    check_dtypes(options)
    check_json_path(options.json_path)


def check_ranks(options: Options, ranks: int) -> None:
    """Refuse a root that is none of the ranks, and more or fewer ranks than there can be."""
    if ranks > MAX_RANKS:
        raise CannotMeasureError(f"--ranks {ranks}: one host has {MAX_RANKS} at most")
    for one in options.each():
        if one.traits.has_root and options.root >= ranks:
            raise CannotMeasureError(
                f"-r {options.root}: there are only {ranks} ranks, 0 to {ranks - 1}"
            )
        if ranks < one.traits.least_ranks:
            raise CannotMeasureError(
                f"{one.collective} is between two ranks at least: name others, or more --ranks"
            )


def check_dtypes(options: Options) -> None:
    """Refuse the dtypes that NumPy has through ml_dtypes alone, where that is missing."""
    needing = {d for one in options.each() for d, _ in one.combinations if d in STORAGE}
    if needing and importlib.util.find_spec("ml_dtypes") is None:
        raise CannotMeasureError(
            f"-d {','.join(sorted(needing))} needs ml_dtypes, which is not installed: "
            "pip install ml_dtypes"
        )


def check_json_path(path: Path | None) -> None:
    """Refuse a place that cannot be written to, before minutes of measuring."""
    if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        raise CannotMeasureError(f"--json {path}: no file can be written there")


def check_memory(options: Options, ranks: int, peers: int) -> None:
    """Refuse a size that this machine has not the memory for."""
    largest = options.asked_sizes_bytes[-1]
    needed = environment.needed_bytes(options, ranks, peers)
    available = environment.available_bytes()
    if available is not None and needed > MEMORY_MARGIN * available:
        raise CannotMeasureError(
            f"-e {largest} with {ranks} ranks and {1 + peers} libraries needs "
            f"{needed / 2**30:.1f} GiB for the arrays, and {available / 2**30:.1f} GiB are "
            "available: choose a smaller -e, fewer ranks or fewer peers"
        )


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM unwind as Ctrl-C does, so that no rank is left over."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(EXIT_TERMINATED)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
