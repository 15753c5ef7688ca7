"""Parse and check the command line of ``gpucoll-bench``."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpucoll.bench.argument_parser import build_parser
from gpucoll.bench.argument_types import sizes
from gpucoll.bench.collectives import DTYPES, Collective
from gpucoll.bench.other_names import OTHER_NAMES
from gpucoll.bench.patterns import MEASURED, PATTERNS
from gpucoll.bench.peers import PEERS
from gpucoll.bench.predict.command import Prediction, read_arguments
from gpucoll.bench.rank.arrays import TEST_ARRAY
from gpucoll.bench.rank.inputs import STORAGE

__all__ = ["Options", "parse"]

LAST_BYTES = 64 << 20
"""The largest size if the user names none."""


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes
    ----------
    collectives : tuple of str
        Collectives and patterns, in the order of measurement.
    collective : str
        The current one. Traits, sizes, combinations and variants are those of this one.
    ranks : int or None
        None for the default: by the number of CPUs, or as many as the launcher has started.
    asked_sizes_bytes : tuple of int
        In the order of measurement.
    step : str
        The step between sizes, for the table's header.
    list_length : int
        Number of arrays in a list; 1 for no list.
    reps, warmup : int or None
        Calls in a sample, and before the first sample; None to choose them by time.
    rounds : int
        Number of samples of each case.
    sample_s : float
        How long a sample should take if `reps` is None.
    torch : bool
        Whether PyTorch's tensors on the host are measured in addition.
    work_s : float
        How long a rank works during an asynchronous call.
    pinned : bool
        Whether each rank gets a CPU of its own, if there are enough.
    one_cpu : bool
        Whether all ranks share one CPU. gpucoll's ranks move to it after they have met.
    array : str
        The kind of arrays: "numpy", on GPUs "cupy" or "torch", or "host-device".
    backend : str
        The backend that gpucoll uses for arrays on GPUs; "mpi" applies to NumPy arrays, too.
    percentiles : bool
        Whether single calls are timed in addition.
    progress : bool
        Whether progress is shown without a terminal, too.
    other_names : tuple of str
        The collectives that the user called by another benchmark's name: keys of `OTHER_NAMES`.
    left_out : tuple of str
        Dtypes that ``-d all`` leaves out because they are not available here.
    compare : dict
        Peer -> path of its Python; None for this process's environment.
    json_path, csv_path : Path or None
        Where to write the results. A CSV at ``-`` goes to stdout, and there is no table.
    predict : Prediction or None
        What to predict from the results.
    """

    collectives: tuple[str, ...]
    collective: str
    ranks: int | None
    asked_sizes_bytes: tuple[int, ...]
    step: str
    list_length: int
    dtypes: list[str]
    redops: list[str]
    root: int
    reps: int | None
    warmup: int | None
    rounds: int
    sample_s: float
    check: bool
    symmetric: bool
    plan: bool
    limit: bool
    torch: bool
    work_s: float
    pinned: bool
    one_cpu: bool
    array: str
    backend: str
    compare: dict[str, str | None]
    json_path: Path | None
    csv_path: Path | None
    plot_path: Path | None
    html_path: Path | None
    timeout_s: float
    command_line: str
    percentiles: bool = False
    progress: bool = False
    other_names: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    predict: Prediction | None = None

    def each(self) -> Iterator[Options]:
        """Yield the options for each collective in turn."""
        for collective in self.collectives:
            yield replace(self, collective=collective)

    @property
    def csv_on_stdout(self) -> bool:
        """Whether stdout gets the CSV instead of the table."""
        return self.csv_path == Path("-")

    @property
    def on_gpus(self) -> bool:
        """Whether the arrays are on GPUs or on Host devices."""
        return self.array != "numpy"

    @property
    def traits(self) -> Collective:
        """The traits of the current collective."""
        return MEASURED[self.collective]

    @property
    def sizes_bytes(self) -> tuple[int, ...]:
        """The sizes to measure; a single 0 if there are no arrays."""
        return self.asked_sizes_bytes if self.traits.has_data else (0,)

    @property
    def combinations(self) -> tuple[tuple[str, str], ...]:
        """The dtypes and reductions to measure."""
        return self.traits.combinations(self.dtypes, self.redops)

    def steps(self, ranks: int) -> Iterator[tuple[str, str, int]]:
        """Yield dtype, reduction and number of elements of each step of the measurement."""
        for dtype, redop in self.combinations:
            counts = [self.traits.elements(size, dtype, ranks) for size in self.sizes_bytes]
            for count in dict.fromkeys(counts):
                yield dtype, redop, count

    @property
    def variants(self) -> list[str]:
        """The variants of gpucoll to measure, by their names in `rank.library.Call`."""
        extra = {
            "symmetric": self.symmetric and self.traits.has_data,
            "plan": self.plan and self.traits.planned,
            "fused": self.list_length > 1,
            "torch": self.torch and self.traits.has_data and self.traits.tensors,
            "limit": self.limit and self.traits.limited and not self.on_gpus,
            "copy": self.limit and self.traits.has_data and self.on_gpus,
        }
        return [*self.peer_variants, *(name for name, wanted in extra.items() if wanted)]

    @property
    def peer_variants(self) -> list[str]:
        """The variants of other libraries to measure."""
        return ["private", *self.traits.parts]


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Return the options; an invalid argument ends the program with exit code 2."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = build_parser()
    given = parser.parse_args(arguments)
    if given.last is None:
        given.last = max(LAST_BYTES, given.first)
    asked = list(dict.fromkeys(name for names in given.collectives for name in names))
    given.collectives = list(
        dict.fromkeys(OTHER_NAMES[x].collective if x in OTHER_NAMES else x for x in asked)
    )
    given.dtype, left_out = without_missing(given.dtype)
    refuse_contradictions(parser, given)
    predict = read_arguments(parser, given)
    return Options(
        collectives=tuple(given.collectives),
        collective=given.collectives[0],
        ranks=given.ranks,
        asked_sizes_bytes=sizes(given.first, given.last, given.factor, given.increment),
        step=f"{given.increment}(bytes)" if given.increment else f"{given.factor:g}(factor)",
        list_length=given.list,
        dtypes=given.dtype,
        redops=given.redop,
        root=given.root,
        reps=given.reps,
        warmup=given.warmup,
        rounds=given.rounds,
        sample_s=given.sample,
        check=bool(given.check),
        symmetric=given.symmetric,
        plan=given.plan,
        limit=given.limit,
        torch=given.torch,
        work_s=given.work / 1e3,
        pinned=not given.unpinned,
        one_cpu=given.one_cpu,
        array=given.array,
        backend=given.backend,
        compare=given.compare,
        json_path=given.json,
        csv_path=given.csv,
        plot_path=given.plot,
        html_path=given.html,
        timeout_s=given.timeout,
        command_line=shlex.join(["gpucoll-bench", *arguments]),
        percentiles=given.percentiles,
        progress=given.progress,
        other_names=tuple(name for name in asked if name in OTHER_NAMES),
        left_out=left_out,
        predict=predict,
    )


def without_missing(dtypes: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split the dtypes of ``-d all`` into those that are available here and the others.

    NumPy has some dtypes only through ml_dtypes. If such a dtype is named explicitly, an error
    tells which package to install.
    """
    if set(dtypes) != set(DTYPES) or importlib.util.find_spec("ml_dtypes") is not None:
        return dtypes, ()
    return [d for d in dtypes if d not in STORAGE], tuple(d for d in dtypes if d in STORAGE)


def refuse_places(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End the program if a backend or a peer does not support the arrays."""
    if given.backend not in ("auto", "mpi") and given.array == "numpy":
        parser.error(f"--backend {given.backend} moves arrays on GPUs: add --array")
    if given.array == TEST_ARRAY:
        if given.backend not in ("auto", "direct", "mpi", "oneccl"):
            parser.error(
                f"--array {TEST_ARRAY} --backend {given.backend}: no vendor's library supports "
                "Host devices; use --backend direct"
            )
        if given.symmetric:
            parser.error(
                f"--symmetric needs a vendor's library, which --array {TEST_ARRAY} does not have"
            )
        if given.compare:
            names = ", ".join(given.compare)
            parser.error(
                f"--compare {names}: other libraries do not support Host devices. With --array "
                f"{TEST_ARRAY} the comparison is gpucoll's own calls on NumPy arrays"
            )
    for name in given.compare:
        if PEERS[name].on_gpu != (given.array != "numpy"):
            where = "arrays on GPUs: add --array" if PEERS[name].on_gpu else "host arrays only"
            parser.error(f"--compare {name} is for {where}")


def refuse_contradictions(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End the program if valid arguments contradict each other.

    If there are several collectives, an option must apply to at least one of them, and --list to
    all.
    """
    rows = [MEASURED[name] for name in given.collectives]
    names = ", ".join(given.collectives)
    for name, row in zip(given.collectives, rows, strict=True):
        if not row.combinations(given.dtype, given.redop):
            asked = f"-o {','.join(given.redop)} is not defined on -d {','.join(given.dtype)}"
            parser.error(f"{name}: {asked}")
    if given.symmetric and not any(row.has_data for row in rows):
        parser.error(f"{names} has no arrays: --symmetric does not apply")
    if given.plan and not any(row.planned for row in rows):
        parser.error(f"{names} has no plan: --plan does not apply")
    if given.limit and not any(row.limited for row in rows) and given.array == "numpy":
        having = ", ".join(name for name, row in MEASURED.items() if row.limited)
        parser.error(f"--limit: no memory limit is known for {names}, only for {having}")
    if given.limit and not any(row.has_data for row in rows):
        parser.error(f"--limit: {names} has no arrays, so there is no copy of the same size")
    if given.list > 1 and not all(row.listed for row in rows):
        having = " and ".join(name for name, row in MEASURED.items() if row.listed)
        parser.error(f"--list is for {having}, not for {names}")
    if given.list > 1 and (given.symmetric or given.plan or given.limit or given.torch):
        parser.error(
            "--list compares one call with many: leave --symmetric, --plan, --limit and --torch out"
        )
    if given.percentiles and given.array != "numpy":
        parser.error(
            "--percentiles times single calls, but a call on a GPU only enqueues work: leave out "
            "--percentiles or --array"
        )
    if given.percentiles and all(row.own_program or row.checks_itself for row in rows):
        parser.error(f"--percentiles: {names} has no single calls")
    if given.torch and not any(row.has_data and row.tensors for row in rows):
        parser.error(f"--torch: {names} is not measured with tensors")
    if given.torch and given.array != "numpy":
        parser.error(
            "--torch measures PyTorch's tensors on the host; for tensors on GPUs use --array "
            "torch alone"
        )
    patterns = [name for name in given.collectives if name in PATTERNS]
    if patterns and given.array != "numpy":
        parser.error(
            f"--array {given.array}: {', '.join(patterns)} can only be measured on the host"
        )
    if given.one_cpu and given.unpinned:
        parser.error(
            "--one-cpu binds ranks, and --unpinned leaves them unbound: give only one of them"
        )
    if given.one_cpu and given.array != "numpy":
        parser.error("--one-cpu supports only host arrays")
    if given.one_cpu and (programs := [name for name in patterns if MEASURED[name].own_program]):
        parser.error(f"--one-cpu: {', '.join(programs)} cannot be bound")
    for one, other in itertools.combinations(("json", "csv", "plot", "html"), 2):
        if (path := getattr(given, one)) is not None and path == getattr(given, other):
            parser.error(f"--{one} and --{other} name the same file: {path}")
    refuse_places(parser, given)
    if given.last < given.first:
        parser.error(f"-e {given.last} is smaller than -b {given.first} (both in bytes)")
    if given.ranks is not None and not 0 <= given.root < given.ranks:
        last = given.ranks - 1
        parser.error(
            f"-r {given.root}: the root must be one of the {given.ranks} ranks, 0 to {last}"
        )
