"""The steps of tools/gpu_check.py: commands, each with a time limit."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["SANITIZED", "Step", "steps_of"]

HERE = Path(__file__).resolve().parent

SWEEP = ["all_reduce,broadcast,all_gather,reduce_scatter,all_to_all", "--plan"]
SWEEP += ["-b", "4", "-e", "256M", "-f", "64", "--ranks", "1", "--rounds", "5", "--sample", "0.005"]
"""With one rank: cost and correctness of calls, compared with NCCL's own."""

LISTED = ["all_reduce", "--list", "500", "-b", "4K", "-e", "64K", "-f", "16", "--ranks", "1"]
LISTED += ["--rounds", "5", "--sample", "0.005", "--array", "cupy"]
"""500 arrays in one call, compared with 500 calls."""

DIRECT = ["all_reduce,all_gather,reduce_scatter,all_to_all", "--array", "cupy", "--plan"]
DIRECT += ["--backend", "direct", "--ranks", "2", "--limit", "-b", "4K", "-e", "64M", "-f", "128"]
DIRECT += ["--rounds", "5", "--sample", "0.005"]
"""Two ranks that share the GPU, compared with a copy of the same size."""

NCCL_BUILD = [
    "NVCC_GENCODE=-gencode=arch=compute_90,code=sm_90",
    "ONLY_FUNCS=SendRecv|(AllGather|Broadcast) RING *|AllReduce Sum (f16|f32|i32|i64) RING *"
    "|(Reduce|ReduceScatter) Sum f32 RING *",
]
"""A build for Hopper with only the functions that are called: 2.30.7 takes 700 s of CPU time on any
number of CPUs (tried without a GPU), and the library has 30 MB. A call of a function that was left
out does nothing and reports no error."""
NCCL_SHARED = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_ALGO": "Ring",
    "NCCL_MAX_CTAS": "8",
    "NCCL_NVLS_ENABLE": "0",
}
"""For two ranks on a GPU, whose kernels must fit on it at the same time."""

TESTS_NEED = ("pytest", "ml_dtypes")

SANITIZED = "test_ring_step or test_error_feedback or test_pack_500 or test_quantise"
"""The tests that compute-sanitizer runs: each kind of kernel, within the time limit."""


@dataclass(frozen=True)
class Step:
    """A command with a time limit."""

    name: str
    command: Sequence[str]
    limit_s: float
    """It begins only if this much of the total time is left."""
    result: str | None = None
    """A JSON file that it writes in the steps' folder; the report has it under the step's name."""
    needs: Sequence[str] = ()
    """Packages that it needs."""
    may_skip: bool = False
    """Whether it passes if all of its tests are skipped."""
    is_preparation: bool = False
    """Whether it runs every time, whichever steps are selected."""
    is_timed: bool = True
    """Whether it measures times or memory, and so runs alone; others run side by side."""


def step_of(
    name: str,
    program: str,
    arguments: Sequence[str],
    folder: Path,
    limit_s: float,
    needs: Sequence[str] = (),
    ranks: int = 0,
) -> Step:
    """Return a step that runs a program of this folder, with `ranks` under the launcher."""
    result = f"{name.replace(' ', '_')}.json"
    command = [*(launcher(ranks) if ranks else [sys.executable]), str(HERE / program)]
    command += [*arguments, "--output", str(folder / result)]
    return Step(name, command, limit_s, result, needs)


def launcher(ranks: int) -> list[str]:
    """Return the command that starts ranks, to which a program and its arguments are appended."""
    return [sys.executable, "-m", "gpucoll.launcher.cli", "-n", str(ranks)]


def probes_of(folder: Path) -> list[Step]:
    """Return the probes of what the backends need from GPU and driver."""
    steps = [
        step_of(f"memory {probe}", "gpu_memory_probes.py", ["--probe", probe], folder, limit_s)
        for probe, limit_s in (("words", 20), ("exported", 45), ("copies", 40))
    ]
    for count in ("8", "32", "1"):
        arguments = ["--probe", "queues", "--connections", count]
        name = f"streams queues {count}"
        steps.append(step_of(name, "gpu_stream_probes.py", arguments, folder, 40))
    turns = ["--probe", "turns"]
    steps.append(step_of("streams turns", "gpu_stream_probes.py", turns, folder, 60))
    steps.append(step_of("nccl", "gpu_nccl_probes.py", [], folder, 60, ("cupy",)))
    return steps


def collectives_of(folder: Path) -> list[Step]:
    """Return the checks of every call against the oracle: NCCL with 1 rank, direct with 1, 2 and 4.

    The direct backend also runs without shared GPU memory, around a ring, between hosts that are
    played here, and with a rank without a GPU.
    """
    ways: list[tuple[str, int, list[str]]] = [
        ("nccl", 1, []), ("direct", 2, []), ("direct", 1, []), ("direct", 4, []),
        ("direct", 2, ["--staged"]), ("direct", 3, ["--ring"]),
    ]  # fmt: skip
    steps = []
    for backend, ranks, more in ways:
        name = " ".join(["collectives", backend, str(ranks), *more]).replace("--", "")
        given = "gpu_collectives.py", ["--backend", backend, *more], folder, 60, TESTS_NEED, ranks
        steps.append(step_of(name, *given))
    given = "gpu_collectives.py", ["--mixed"], folder, 60, TESTS_NEED, 2
    hosts = step_of("collectives hosts 2", given[0], ["--hosts"], *given[2:])
    return [*steps, step_of("collectives mixed 2", *given), hosts]


def further_checks_of(folder: Path) -> list[Step]:
    """Return the checks of PyTorch's backend, and of all arrays and memory."""
    torch = [
        step_of(f"torch {ranks}", "gpu_torch.py", [], folder, 60, ("torch",), ranks)
        for ranks in (1, 2)
    ]
    kinds = {
        "numba": ("numba", "numba_cuda"),
        "jax": ("jax",),
        "torch-expandable": ("torch",),
        "cupy-async": ("cupy",),
        "nccl-memory": ("cupy",),
    }
    arrays = [
        step_of(f"arrays {kind}", "gpu_arrays.py", ["--kinds", kind], folder, 45, needs, 2)
        for kind, needs in kinds.items()
    ]
    return [*torch, *arrays]


def nccl_built_of(folder: Path) -> list[Step]:
    """Return the steps with two ranks on NCCL: a copy that was built, or is built from source."""
    source = HERE.parent / "build" / "nccl"
    library = source / "build" / "lib" / "libnccl.so.2"
    if not library.exists() and not (source / "Makefile").exists():
        return []
    build = ["make", f"-j{os.cpu_count()}", "-C", str(source), "src.build", *NCCL_BUILD]
    if (nvcc := shutil.which("nvcc")) is not None:
        build.append(f"CUDA_HOME={Path(nvcc).resolve().parents[1]}")
    given = [f"{name}={value}" for name, value in NCCL_SHARED.items()]
    environment = ["env", f"GPUCOLL_NCCL_LIBRARY={library}", *given]
    probe = step_of("nccl built 2", "gpu_nccl_probes.py", ["--without-torch"], folder, 60, (), 2)
    cost = step_of("host cost nccl built 2", "gpu_host_cost.py", [], folder, 60, (), 2)
    steps = [replace(step, command=[*environment, *step.command]) for step in (probe, cost)]
    return steps if library.exists() else [Step("nccl build", build, 400), *steps]


def costs_of(folder: Path) -> list[Step]:
    """Return the measurements of host cost: compared with peers, and through direct."""
    direct = ["--backend", "direct", "--batches", "20"]
    return [
        step_of("host cost", "gpu_host_cost.py", [], folder, 60),
        *(
            step_of(f"host cost direct {ranks}", "gpu_host_cost.py", direct, folder, 30, (), ranks)
            for ranks in (1, 2)
        ),
    ]


def sweeps_of(folder: Path) -> list[Step]:
    """Return the measurements with ``gpucoll-bench``."""
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
    """Return the comparisons of kernels with copies."""
    steps = []
    for group in ("reduce", "cast", "pack", "quantise", "custom"):
        needs = ("numba", "numba_cuda") if group == "custom" else ()
        given = "gpu_benchmarks.py", ["--group", group], folder, 60, needs
        steps.append(step_of(f"benchmark {group}", *given))
    return steps


def tests_of() -> list[Step]:
    """Return the tests that are marked ``gpu``, in groups."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    kernels, shared = "tests/kernels/gpu", "tests/calls/gpu/test_shared_gpu.py"
    through_mpi = "tests/backends/mpi/test_on_gpu.py"
    others = ["tests", *(f"--ignore={path}" for path in (kernels, shared, through_mpi))]
    steps = [
        Step("tests of kernels", [*pytest, kernels], 120, None, TESTS_NEED),
        Step("tests of calls", [*pytest, *side_by_side(), *others], 180, None, TESTS_NEED),
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


def side_by_side() -> list[str]:
    """Return pytest's arguments for files side by side: each test may have four ranks.

    One after the other, the tests of calls took more than 180 s on an H100.
    """
    if importlib.util.find_spec("xdist") is None:
        return []
    return ["-n", str(max(1, (os.cpu_count() or 1) // 4)), "--dist", "loadfile"]


def steps_of(folder: Path) -> list[Step]:
    """Return all steps: first probes, then correctness, then speed."""
    warm = [sys.executable, str(HERE / "gpu_warm.py")]
    checks = [*tests_of(), *collectives_of(folder), *further_checks_of(folder)]
    doctor = ["bash", "-c", 'exec "$0" -m gpucoll.doctor --json > "$1"', sys.executable]
    return [
        Step("warm", warm, 180, is_preparation=True),
        Step("doctor", [*doctor, str(folder / "doctor.json")], 60, "doctor.json"),
        *probes_of(folder),
        *(replace(step, is_timed=False) for step in checks),
        step_of("a rank is killed", "gpu_killed.py", [], folder, 60),
        *benchmarks_of(folder),
        *costs_of(folder),
        *(
            step_of(f"direct sweep {ranks}", "gpu_direct_sweep.py", [], folder, 45, (), ranks)
            for ranks in (2, 4)
        ),
        *sweeps_of(folder),
        *nccl_built_of(folder),
    ]
