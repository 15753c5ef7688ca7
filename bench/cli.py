"""The command ``gpucoll-bench``."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from gpucoll import config
from gpucoll.bench import COMMANDS, environment, launched, page, pictures, table
from gpucoll.bench.arguments import Options, parse
from gpucoll.bench.checks import (
    CannotMeasureError,
    check_dtypes,
    check_files,
    check_host_devices,
    check_launched,
    check_memory,
    check_ranks,
)
from gpucoll.bench.collectives import item_bytes
from gpucoll.bench.csv_results import csv_text
from gpucoll.bench.gpus import check_installed, default_ranks, ranks_on_gpus
from gpucoll.bench.groups import Group, GroupError
from gpucoll.bench.libraries import ready_programs, start_own, start_peers
from gpucoll.bench.measure import Bench, seconds_of_samples
from gpucoll.bench.measure_programs import ProgramBench
from gpucoll.bench.other_names import explained
from gpucoll.bench.peers import PeerMissingError, locate
from gpucoll.bench.predict.command import predicted_lines
from gpucoll.bench.programs import Program
from gpucoll.bench.progress import Progress, way_to_show
from gpucoll.bench.rank.arrays import TEST_ARRAY, NoGpuError
from gpucoll.bench.rank.own import joined
from gpucoll.bench.results import Results, Row, write_whole
from gpucoll.bench.starts import cpus_of_ranks
from gpucoll.bench.time_left import Step
from gpucoll.command_line import run_printing
from gpucoll.errors import ArgumentError, GpucollError
from gpucoll.rendezvous import launchers
from gpucoll.topology import usable_cpu_count, usable_cpus
from gpucoll.topology.host_identity import host_id

__all__ = ["main"]

EXIT_RIGHT = 0
EXIT_WRONG = 1  # wrong results, or a failure while measuring
EXIT_USAGE = 2  # nothing was measured
EXIT_INTERRUPTED = 130


class CannotWriteError(Exception):
    """The table or a file cannot be written; the message says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments and (name := arguments[0]) in COMMANDS:
        inner = importlib.import_module(f"gpucoll.bench.{name}")
        return run_printing(f"gpucoll-bench {name}", inner.main, arguments[1:])
    options = parse(arguments)
    try:
        if options.predict is not None and options.predict.sources:
            predict(options, None)
            return EXIT_RIGHT
        way = way_to_show(options.progress, is_table=not options.csv_on_stdout)
        with terminated_like_interrupted(), Progress(way) as progress:
            if under_launcher(os.environ):
                return run_launched(options, progress)
            return run_alone(options, progress)
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
    except pictures.NothingToDrawError as error:
        complain(f"--plot: {error}")
        return EXIT_WRONG
    except KeyboardInterrupt:
        complain("interrupted; every rank was ended")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of the table has closed the pipe. Python would fail again when it flushes at
        # exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_WRONG


def run_alone(options: Options, progress: Progress) -> int:
    """Start the ranks of every library, measure, and end them."""
    if options.backend == "mpi":
        raise CannotMeasureError(
            "--backend mpi measures ranks that MPI has started: run mpiexec -n 4 gpucoll-bench "
            "all_reduce --backend mpi"
        )
    ranks = options.ranks or default_ranks()
    if options.on_gpus:
        ranks = ranks_on_gpus(options.array, options.ranks, options.backend)
    check_ranks(options, ranks)
    check_dtypes(options)
    check_host_devices(options)
    check_files(options)
    located = [locate(name, place) for name, place in options.compare.items()]
    if options.array in ("numpy", TEST_ARRAY):
        check_memory(options, ranks, len(located))
    compile_kernels()

    def tell(text: str) -> None:
        progress.clear()
        note(options, text)

    progress.show(f"starting {', '.join(['gpucoll', *options.compare])}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpucoll-bench-")))
        programs = []
        if any(one.traits.own_program for one in options.each()):
            programs = ready_programs(options, located, ranks, folder, tell)
        if all(one.traits.own_program for one in options.each()):
            return measure(options, None, [], [], programs, progress)
        # Vendors' libraries have threads, which need CPUs of their own.
        cpus = [] if options.on_gpus or not options.pinned else cpus_of_ranks(ranks)
        if options.one_cpu:
            cpus = [min(usable_cpus())] * ranks
        peers = start_peers(options, located, ranks, cpus, stack, folder)
        own = start_own(options, ranks, cpus, stack)
        return measure(options, own[0], [*own[1:], *peers], cpus, programs, progress)


def run_launched(options: Options, progress: Progress) -> int:
    """Measure with the ranks that a launcher has started; only rank 0 prints."""
    check_installed(options.array)
    library = joined(options.array, config.local_rank(), options.timeout_s, options.backend)
    with library.comm as comm:
        try:
            check_launched(options, comm.world_size)
        except CannotMeasureError:
            if comm.rank:
                return EXIT_USAGE
            raise
        hosts = len({*comm.all_gather_object(host_id())})
        if comm.rank:
            launched.follow(comm, library)
            return EXIT_RIGHT
        with ExitStack() as stack:
            own = launched.LaunchedGroup(comm, library)
            stack.callback(own.close)
            return measure(options, own, [], own.cpus, [], progress, hosts)


def measure(
    options: Options,
    own: Group | None,
    peers: list[Group],
    cpus: list[int],
    programs: list[Program],
    progress: Progress,
    hosts: int = 1,
) -> int:
    """Measure the collectives one after the other and print the results; return the exit code.

    `own` is None if there are only `programs`.
    """
    libraries = programs if own is None else [own, *peers]
    ranks = libraries[0].ranks
    clock_ns = None
    if own is not None and options.percentiles:
        clocks = own.call("clock", options.timeout_s)
        clock_ns = max(answer["nanoseconds"] for answer in clocks)
    described = environment.describe(options, ranks, cpus, libraries, clock_ns)
    described["hosts"] = hosts
    results = Results(described)

    show = discard if options.csv_on_stdout else say

    def report(rows: list[Row], limit: Row | None) -> None:
        show(table.lines_of_size(rows, limit, options.percentiles))

    progress.clear()
    progress.plan(steps_of(options, ranks), partial(seconds_of_samples, options))
    tell = partial(note, options)
    if options.left_out:
        names = ", ".join(options.left_out)
        tell(f"left out of -d all: {names}, which need ml_dtypes: pip install ml_dtypes")
    usable = usable_cpu_count()
    if ranks > usable and not (options.on_gpus or options.one_cpu):
        tell(
            f"{ranks} ranks on {usable} usable CPUs take turns: times are mostly those of the "
            "scheduler, and say little of the libraries"
        )
    for text in explained(options.other_names, ranks):
        tell(text)
    for number, one in enumerate(options.each()):
        show(table.header(one, ranks, None if number else described))
        if own is None or one.traits.own_program:
            ProgramBench(one, programs, results, report, complain, progress).run()
        else:
            Bench(one, own, peers, results, report, complain, tell, progress).run()
    show(table.footer(results))
    write_files(options, results)
    if options.predict is not None and not options.csv_on_stdout:
        predict(options, results)
    return EXIT_WRONG if results.wrong or results.failures else EXIT_RIGHT


def steps_of(options: Options, ranks: int) -> list[Step]:
    """Return the steps of the whole run, in order."""
    steps = []
    for one in options.each():
        if one.traits.own_program:
            steps.append(Step(one.collective, 0))
        else:
            each = one.steps(ranks)
            steps += [
                Step("call", count * item_bytes(dtype) if count else 0) for dtype, _, count in each
            ]
    return steps


def write_files(options: Options, results: Results) -> None:
    """Write the results to the files that the options name."""
    try:
        if options.json_path is not None:
            results.write(options.json_path)
        if options.csv_path is not None and not options.csv_on_stdout:
            write_whole(options.csv_path, csv_text(results))
        if options.plot_path is not None:
            pictures.save(pictures.overview(results.as_json()), options.plot_path)
        if options.html_path is not None:
            page.save([results.as_json()], options.html_path)
    except OSError as error:
        raise CannotWriteError(f"{error.strerror} ({error.filename})") from error
    finally:  # a picture that cannot be drawn is no reason to lose what was measured
        if options.csv_on_stdout:
            say(iter([csv_text(results)]), end="")


def predict(options: Options, results: Results | None) -> None:
    """Print predictions from the results, or from kept ones; CannotMeasureError: they are none."""
    assert options.predict is not None
    try:
        content = None if results is None else results.as_json()
        say(predicted_lines(options.predict, options.sizes_bytes, content))
    except ArgumentError as error:
        raise CannotMeasureError(str(error)) from error


def say(lines: Iterator[str], end: str = "\n") -> None:
    """Print lines, and flush them even into a pipe."""
    for line in lines:
        try:
            print(line, end=end, flush=True)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise CannotWriteError(error.strerror) from error


def discard(lines: Iterator[str]) -> None:
    """Print nothing: stdout is for the CSV."""


def note(options: Options, text: str) -> None:
    """Print a note into the table, or to standard error if there is no table."""
    if options.csv_on_stdout:
        print(*table.wrapped(text), sep="\n", file=sys.stderr, flush=True)
    else:
        say(table.wrapped(text))


def complain(text: str) -> None:
    """Print an error message."""
    print(f"gpucoll-bench: {text}", file=sys.stderr, flush=True)


def compile_kernels() -> None:
    """Compile the kernels if they are not cached, with a message, since it takes seconds."""
    from gpucoll.backends.precompile import ensure_compiled

    try:
        ensure_compiled(report=lambda line: print(f"# {line}", file=sys.stderr, flush=True))
    except (subprocess.CalledProcessError, GpucollError) as error:
        raise CannotMeasureError(f"the kernels do not compile here: {error}") from error


def under_launcher(variables: Mapping[str, str]) -> bool:
    """Return whether a launcher has started this process as one rank of a job."""
    if config.WORLD_SIZE in variables or {"RANK", "WORLD_SIZE"} <= variables.keys():
        return True
    started = launchers.find()  # a single task may be a shell: see `launchers.find`
    return started is not None and started.world_size > 1


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Make SIGTERM, and SIGHUP of a closed terminal, unwind like Ctrl-C: no rank is left behind."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if is_handled(number)]
    previous = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def is_handled(number: signal.Signals) -> bool:
    """Return whether a signal has an effect; nohup makes SIGHUP one that has none."""
    return signal.getsignal(number) is not signal.SIG_IGN
