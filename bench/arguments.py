"""What the command line of ``gpucoll-bench`` means: checked, as `Options`."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpucoll.bench.argument_parser import build_parser
from gpucoll.bench.argument_types import sizes
from gpucoll.bench.collectives import DTYPES, Collective
from gpucoll.bench.patterns import MEASURED, PATTERNS
from gpucoll.bench.peers import PEERS
from gpucoll.bench.rank.arrays import TEST_ARRAY
from gpucoll.bench.rank.inputs import STORAGE

__all__ = ["Options", "parse"]


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes
    ----------
    collectives : tuple of str
        And patterns: in the order to be measured.
    collective : str
        The one at hand: what depends on it (its traits, sizes, combinations, variants) is of this.
    ranks : int or None
        None where nothing was said: as many as there are CPUs, or as the launcher started.
    asked_sizes_bytes : tuple of int
        In the order to be measured.
    step : str
        How they follow each other, for the table's header.
    list_length : int
        Arrays in a list; 1: no list.
    reps, warmup : int or None
        Calls in a sample, and before the first; None: chosen by time.
    rounds : int
        Samples of each case.
    sample_s : float
        How long a sample should take where `reps` is None.
    torch : bool
        Whether PyTorch's tensors on the host are measured, too.
    work_s : float
        How long a rank works beside an asynchronous call.
    pinned : bool
        Whether each rank gets a CPU of its own, where there are enough.
    one_cpu : bool
        Whether all ranks share one, gpucoll's from after they have met.
    array : str
        Whose arrays: "numpy", or on the ranks' GPUs "cupy" or "torch", or on "host-device"s.
    backend : str
        Which backend gpucoll takes for arrays on GPUs; "mpi": for NumPy's, too.
    left_out : tuple of str
        Dtypes that ``-d all`` means, and that are not to be had here.
    compare : dict
        Peer -> path of its Python, or None: the environment of this one.
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
    timeout_s: float
    command_line: str
    left_out: tuple[str, ...] = ()

    def each(self) -> Iterator[Options]:
        """Yield the options with one collective after the other at hand."""
        for collective in self.collectives:
            yield replace(self, collective=collective)

    @property
    def on_gpus(self) -> bool:
        """Whether the arrays lie on GPUs, or on what stands for them."""
        return self.array != "numpy"

    @property
    def traits(self) -> Collective:
        """The row of the collective."""
        return MEASURED[self.collective]

    @property
    def sizes_bytes(self) -> tuple[int, ...]:
        """The sizes to be measured; one of 0 where there are no arrays."""
        return self.asked_sizes_bytes if self.traits.has_data else (0,)

    @property
    def combinations(self) -> tuple[tuple[str, str], ...]:
        """The dtypes and reductions to be measured."""
        return self.traits.combinations(self.dtypes, self.redops)

    @property
    def variants(self) -> list[str]:
        """What to measure of gpucoll, by the names that `rank.library.Call` uses."""
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
        """What to measure of the other libraries."""
        return ["private", *self.traits.parts]


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Return the options; an argument that cannot be meant ends the program with exit code 2."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = build_parser()
    given = parser.parse_args(arguments)
    given.dtype, left_out = without_missing(given.dtype)
    refuse_contradictions(parser, given)
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
        timeout_s=given.timeout,
        command_line=" ".join(["gpucoll-bench", *arguments]),
        left_out=left_out,
    )


def without_missing(dtypes: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Divide all dtypes, where all were asked for, into those that are there and the others.

    NumPy has some only through ml_dtypes. Who asks for one by name is told what to install.
    """
    if set(dtypes) != set(DTYPES) or importlib.util.find_spec("ml_dtypes") is not None:
        return dtypes, ()
    return [d for d in dtypes if d not in STORAGE], tuple(d for d in dtypes if d in STORAGE)


def refuse_places(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End the program where arrays are asked for that a backend or a peer does not move."""
    if given.backend not in ("auto", "mpi") and given.array == "numpy":
        parser.error(f"--backend {given.backend} moves arrays on GPUs: give --array too")
    if given.array == TEST_ARRAY:
        if given.backend not in ("auto", "direct", "mpi"):
            parser.error(
                f"--array {TEST_ARRAY} --backend {given.backend}: there is no vendor's library for "
                "Host devices; direct moves their arrays"
            )
        if given.symmetric:
            parser.error(
                f"--symmetric is memory of a vendor's library, not of --array {TEST_ARRAY}"
            )
        if given.compare:
            names = ", ".join(given.compare)
            parser.error(
                f"--compare {names}: no other library knows Host devices; beside --array "
                f"{TEST_ARRAY} gpucoll's own calls on NumPy's arrays are measured"
            )
    for name in given.compare:
        if PEERS[name].on_gpu != (given.array != "numpy"):
            where = "arrays on GPUs: give --array too" if PEERS[name].on_gpu else "host arrays only"
            parser.error(f"--compare {name} is for {where}")


def refuse_contradictions(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End the program where arguments that are right by themselves cannot be meant together.

    Of several collectives, one at least must have what is asked for; all must have lists.
    """
    rows = [MEASURED[name] for name in given.collectives]
    names = ", ".join(given.collectives)
    for name, row in zip(given.collectives, rows, strict=True):
        if not row.combinations(given.dtype, given.redop):
            asked = f"-o {','.join(given.redop)} is not defined on -d {','.join(given.dtype)}"
            parser.error(f"{name}: {asked}")
    if given.symmetric and not any(row.has_data for row in rows):
        parser.error(f"{names} has no arrays: --symmetric means nothing here")
    if given.plan and not any(row.planned for row in rows):
        parser.error(f"{names} has no plan: --plan means nothing here")
    if given.limit and not any(row.limited for row in rows) and given.array == "numpy":
        having = ", ".join(name for name, row in MEASURED.items() if row.limited)
        parser.error(f"--limit: no memory limit is known of {names}, only of {having}")
    if given.limit and not any(row.has_data for row in rows):
        parser.error(f"--limit: {names} has no arrays, and no copy is as much as it moves")
    if given.list > 1 and not all(row.listed for row in rows):
        having = " and ".join(name for name, row in MEASURED.items() if row.listed)
        parser.error(f"--list is for {having}, not for {names}")
    if given.list > 1 and (given.symmetric or given.plan or given.limit or given.torch):
        parser.error(
            "--list: one call beside many; leave --symmetric, --plan, --limit and --torch out"
        )
    if given.torch and not any(row.has_data and row.tensors for row in rows):
        parser.error(f"--torch: {names} is not measured with tensors")
    if given.torch and given.array != "numpy":
        parser.error("--torch is PyTorch's tensors on the host; on GPUs: --array torch alone")
    patterns = [name for name in given.collectives if name in PATTERNS]
    if patterns and given.array != "numpy":
        parser.error(f"--array {given.array}: {', '.join(patterns)} is measured on the host only")
    if given.one_cpu and given.unpinned:
        parser.error("--one-cpu binds ranks, and --unpinned does not: leave one of them out")
    if given.one_cpu and given.array != "numpy":
        parser.error("--one-cpu is for host arrays")
    if given.one_cpu and (programs := [name for name in patterns if MEASURED[name].own_program]):
        parser.error(f"--one-cpu: {', '.join(programs)} cannot be bound")
    refuse_places(parser, given)
    if given.last < given.first:
        parser.error(f"-e {given.last} is smaller than -b {given.first} (both in bytes)")
    if given.ranks is not None and not 0 <= given.root < given.ranks:
        last = given.ranks - 1
        parser.error(
            f"-r {given.root}: the root must be one of the {given.ranks} ranks, 0 to {last}"
        )
