"""What tools/gpu_check.py runs on a GPU: commands, each with its limit of time."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SANITIZED", "Step", "steps_of"]

HERE = Path(__file__).resolve().parent

SWEEP = ["all_reduce,broadcast,all_gather,reduce_scatter,all_to_all", "--plan"]
SWEEP += ["-b", "4", "-e", "256M", "-f", "64", "--ranks", "1", "--rounds", "5", "--sample", "0.005"]
"""Of calls with one rank: what they cost beside NCCL's own, and that they are right."""

LISTED = ["all_reduce", "--list", "500", "-b", "4K", "-e", "64K", "-f", "16", "--ranks", "1"]
LISTED += ["--rounds", "5", "--sample", "0.005", "--array", "cupy"]
"""Of 500 arrays in one call beside 500 calls."""

DIRECT = ["all_reduce,all_gather,reduce_scatter,all_to_all", "--array", "cupy", "--plan"]
DIRECT += ["--backend", "direct", "--ranks", "2", "--limit", "-b", "4K", "-e", "64M", "-f", "128"]
DIRECT += ["--rounds", "5", "--sample", "0.005"]
"""Of two ranks that share the GPU, beside a copy of as many bytes."""

TESTS_NEED = ("pytest", "ml_dtypes")

SANITIZED = "test_ring_step or test_error_feedback or test_pack_500 or test_quantise"
"""What compute-sanitizer runs: each kind of kernel, in the time that there is."""


@dataclass(frozen=True)
class Step:
    """A command, and how long it may take."""

    name: str
    command: Sequence[str]
    limit_s: float
    """It begins only where so much is left of the whole."""
    result: str | None = None
    """A JSON file that it writes in the folder of all steps: in the report by the step's name."""
    needs: Sequence[str] = ()
    """Packages without which it cannot run."""
    may_skip: bool = False
    """Whether it passes where all of its tests are skipped."""
    is_preparation: bool = False
    """Whether it is done in every run, whichever steps are asked for."""


def probes_of_memory(folder: Path) -> list[Step]:
    """Return what tells whether the direct backend's ways are there: copies, words, IPC."""
    steps = []
    for probe, limit_s in (("words", 20), ("exported", 45), ("copies", 40)):
        result = f"memory_{probe}.json"
        command = [sys.executable, str(HERE / "gpu_memory_probes.py"), "--probe", probe]
        command += ["--output", str(folder / result)]
        steps.append(Step(f"memory {probe}", command, limit_s, result))
    return steps


def collectives_of(folder: Path) -> list[Step]:
    """Return every call against the oracle: by NCCL with one rank, by direct with 1, 2 and 4.

    By direct also with no memory shared, as between hosts, and with a rank that has no GPU.
    """
    steps = []
    ways: list[tuple[str, int, list[str]]] = [
        ("nccl", 1, []), ("direct", 2, []), ("direct", 1, []), ("direct", 4, []),
        ("direct", 2, ["--staged"]),
    ]  # fmt: skip
    for backend, ranks, more in ways:
        words = [backend, str(ranks), *(word.removeprefix("--") for word in more)]
        result = f"collectives_{'_'.join(words)}.json"
        command = [*launcher(ranks), str(HERE / "gpu_collectives.py"), "--backend", backend]
        command += [*more, "--output", str(folder / result)]
        name = " ".join(["collectives", *words])
        steps.append(Step(name, command, 60, result, TESTS_NEED))
    result = "collectives_mixed_2.json"
    command = [*launcher(2), str(HERE / "gpu_collectives.py"), "--mixed"]
    command += ["--output", str(folder / result)]
    steps.append(Step("collectives mixed 2", command, 60, result, TESTS_NEED))
    return steps


def launcher(ranks: int) -> list[str]:
    """Return what starts ranks, before a program and its arguments."""
    return [sys.executable, "-m", "gpucoll.launcher.cli", "-n", str(ranks)]


def costs_of(folder: Path) -> list[Step]:
    """Return what a call costs its caller: beside its peers, and through direct."""
    program = str(HERE / "gpu_host_cost.py")
    alone = [sys.executable, program, "--output", str(folder / "host_cost.json")]
    steps = [Step("host cost", alone, 60, "host_cost.json")]
    for ranks in (1, 2):
        result = f"host_cost_direct_{ranks}.json"
        command = [*launcher(ranks), program, "--backend", "direct", "--batches", "20"]
        command += ["--output", str(folder / result)]
        name = f"host cost direct {ranks}"
        steps.append(Step(name, command, 30, result))
    return steps


def sweeps_of(folder: Path) -> list[Step]:
    """Return what ``gpucoll-bench`` measures."""
    has_torch = importlib.util.find_spec("torch") is not None
    peers = "cupy-nccl,torch-nccl" if has_torch else "cupy-nccl"
    sweeps = {
        "bench": [*SWEEP, "--array", "cupy", "--symmetric", "--compare", peers],
        "bench_list": LISTED,
        "bench_direct": DIRECT,
    }
    if has_torch:
        sweeps["bench_torch"] = [*SWEEP, "--array", "torch"]
    steps = []
    for key, arguments in sweeps.items():
        command = [sys.executable, "-m", "gpucoll.bench", *arguments]
        command += ["--json", str(folder / f"{key}.json")]
        steps.append(Step(key.replace("_", " "), command, 60, f"{key}.json"))
    return steps


def benchmarks_of(folder: Path) -> list[Step]:
    """Return what measures kernels beside copies."""
    steps = []
    for group in ("reduce", "cast", "pack", "quantise", "custom"):
        result = f"benchmark_{group}.json"
        command = [sys.executable, str(HERE / "gpu_benchmarks.py"), "--group", group]
        command += ["--output", str(folder / result)]
        needs = ("numba", "numba_cuda") if group == "custom" else ()
        steps.append(Step(f"benchmark {group}", command, 60, result, needs))
    return steps


def tests_of() -> list[Step]:
    """Return the tests that are marked ``gpu``, in groups."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    kernels, shared = "tests/kernels/gpu", "tests/calls/gpu/test_shared_gpu.py"
    through_mpi = "tests/backends/mpi/test_on_gpu.py"
    others = ["tests", *(f"--ignore={path}" for path in (kernels, shared, through_mpi))]
    steps = [
        Step("tests of kernels", [*pytest, kernels], 120, None, TESTS_NEED),
        Step("tests of calls", [*pytest, *others], 180, None, TESTS_NEED),
        Step("two ranks on one GPU", [*pytest, shared], 60, None, TESTS_NEED, may_skip=True),
        Step(
            "MPI and the GPU", [*pytest, "-rP", through_mpi], 100, None, TESTS_NEED, may_skip=True
        ),
    ]
    if sanitizer := shutil.which("compute-sanitizer"):
        checked = [sanitizer, "--error-exitcode", "9", "--target-processes", "all"]
        chosen = ["-k", SANITIZED, "tests/kernels/gpu/test_on_gpu.py"]
        steps.append(Step("compute-sanitizer", [*checked, *pytest, *chosen], 120, None, TESTS_NEED))
    return steps


def steps_of(folder: Path) -> list[Step]:
    """Return everything that is done: probes first, then correctness, then speed."""
    warm = [sys.executable, str(HERE / "gpu_warm.py")]
    doctor = ["bash", "-c", 'exec "$0" -m gpucoll.doctor --json > "$1"', sys.executable]
    return [
        Step("warm", warm, 180, is_preparation=True),
        Step("doctor", [*doctor, str(folder / "doctor.json")], 60, "doctor.json"),
        *probes_of_memory(folder),
        *collectives_of(folder),
        *tests_of(),
        *benchmarks_of(folder),
        *costs_of(folder),
        *sweeps_of(folder),
    ]
