"""Check gpucoll on a GPU: tests, speed of kernels and calls, compute-sanitizer. Under 8 minutes.

::

    python tools/gpu_check.py --output results

It needs one GPU and the machine's own CuPy, NumPy, Numba, pytest and ml_dtypes (PyTorch and
numba-cuda where they are), no network, and no installation: it sees gpucoll through the link tree.

Each step runs in a process of its own that is killed, with all that it started, when its time is
up. ``DIR/gpu_check.json`` is written anew after each step, so a step that takes the machine down
loses nothing of those before; beside it lie the steps' outputs. The exit code is 0 if everything
passed, 1 if something failed or could not run, 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import link_tree

ROOT = link_tree.ROOT
HERE = Path(__file__).resolve().parent
SCHEMA = 1
LIMIT_S = 460.0
"""Of everything together."""
KILL_WAIT_S = 10.0
OK, FAILED, NO_GPU = 0, 1, 2

ENVIRONMENT = """
import importlib, json, platform, sys
found = {"python": platform.python_version(), "machine": platform.machine(), "versions": {}}
NAMES = "numpy cupy numba numba_cuda torch jax ml_dtypes pytest mpi4py"
for name in NAMES.split():
    try:
        module = importlib.import_module(name)
        found["versions"][name] = str(getattr(module, "__version__", "unknown"))
    except Exception as error:
        found["versions"][name] = None
        found.setdefault("missing", {})[name] = f"{type(error).__name__}: {error}"
try:  # loaded late, when a kernel is compiled; old ones do not know new versions of NumPy
    importlib.import_module("numba.cuda.np.arrayobj")
except Exception as error:
    found.setdefault("missing", {})["numba_cuda"] = f"{type(error).__name__}: {error}"
from gpucoll.version import __version__
found["versions"]["gpucoll"] = __version__
from gpucoll.backends import BACKENDS
found["backends"] = list(BACKENDS)
try:
    import cupy
    runtime = cupy.cuda.runtime
    count = runtime.getDeviceCount()
    if count:
        properties = runtime.getDeviceProperties(0)
        found["gpus"] = count
        found["device"] = {
            "name": properties["name"].decode(),
            "memory_bytes": properties["totalGlobalMem"],
            "multiprocessors": properties["multiProcessorCount"],
            "architecture": f"{properties['major']}.{properties['minor']}",
        }
        found["driver_version"] = runtime.driverGetVersion()
        found["runtime_version"] = runtime.runtimeGetVersion()
    else:
        found["no_gpu"] = "CuPy sees none"
except Exception as error:
    found["no_gpu"] = f"{type(error).__name__}: {error}"
with open(sys.argv[1], "w") as file:
    json.dump(found, file)
"""

SWEEP = ["all_reduce,broadcast,all_gather,reduce_scatter,all_to_all", "--plan"]
SWEEP += ["-b", "4", "-e", "256M", "-f", "64", "--ranks", "1", "--rounds", "5", "--sample", "0.005"]
"""Of calls with one rank: what they cost beside NCCL's own, and that they are right."""

LISTED = ["all_reduce", "--list", "500", "-b", "4K", "-e", "64K", "-f", "16", "--ranks", "1"]
LISTED += ["--rounds", "5", "--sample", "0.005", "--array", "cupy"]
"""Of 500 arrays in one call beside 500 calls."""

SANITIZED = "test_ring_step or test_error_feedback or test_pack_500 or test_quantise"
"""What compute-sanitizer runs: each kind of kernel, in the time that there is."""


@dataclass(frozen=True)
class Step:
    """A command, and how long it may take."""

    name: str
    command: Sequence[str]
    limit_s: float
    result: str | None = None
    """A JSON file that it writes in the output folder."""
    key: str = "benchmarks"
    """Where in the report that goes; what is a list there is added to."""
    may_skip: bool = False
    """Whether it passes where all of its tests are skipped."""
    backend: str = ""
    """The step is left out where this version of gpucoll lacks this backend."""


@dataclass
class Outcome:
    """How a step went: "passed", "failed", "killed", "not run" or "left out"."""

    name: str
    status: str
    elapsed_s: float = 0.0
    detail: str = ""


@dataclass
class Report:
    """What is written: see ``bench/results/README.md``."""

    schema: int = SCHEMA
    date: str = ""
    status: str = "running"
    environment: dict[str, Any] = field(default_factory=dict)
    steps: list[Outcome] = field(default_factory=list)
    benchmarks: list[dict[str, Any]] = field(default_factory=list)
    host_cost: list[dict[str, Any]] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    collectives: list[dict[str, Any]] = field(default_factory=list)
    doctor: dict[str, Any] = field(default_factory=dict)
    bench: dict[str, Any] = field(default_factory=dict)
    bench_torch: dict[str, Any] = field(default_factory=dict)
    bench_list: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write all there is, in one step."""
        new = folder / "gpu_check.json.new"
        new.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        new.replace(folder / "gpu_check.json")


def run_watched(command: Sequence[str], limit_s: float, log: Path) -> tuple[str, float, str]:
    """Run a command in a session of its own; return its status, its time and its last line."""
    environment = dict(os.environ)
    places = [str(link_tree.DEFAULT_PLACE), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    begin = time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
            status = "passed" if process.returncode == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "killed"
        _end(process)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return status, time.monotonic() - begin, lines[-1] if lines else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process's session; one that a driver holds is not waited for."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    try:
        process.wait(KILL_WAIT_S)
    except subprocess.TimeoutExpired:
        process.returncode = -signal.SIGKILL  # Popen would warn of it; it ends with this machine


def probes_of_memory(folder: Path) -> list[Step]:
    """Return what tells whether the direct backend's ways are there: copies, words, IPC."""
    steps = []
    for probe, limit_s in (("words", 20), ("exported", 45), ("copies", 40)):
        result = f"memory_{probe}.json"
        command = [sys.executable, str(HERE / "gpu_memory_probes.py"), "--probe", probe]
        command += ["--output", str(folder / result)]
        steps.append(Step(f"memory {probe}", command, limit_s, result, "memory"))
    return steps


def collectives_of(folder: Path) -> list[Step]:
    """Return every call against the oracle: by NCCL with one rank, by direct with 1, 2 and 4."""
    steps = []
    for backend, ranks in (("nccl", 1), ("direct", 2), ("direct", 1), ("direct", 4)):
        result = f"collectives_{backend}_{ranks}.json"
        command = [sys.executable, "-m", "gpucoll.launcher.cli", "-n", str(ranks)]
        command += [str(HERE / "gpu_collectives.py"), "--backend", backend]
        command += ["--output", str(folder / result)]
        name = f"collectives {backend} {ranks}"
        steps.append(Step(name, command, 50, result, "collectives", backend=backend))
    return steps


def steps_of(folder: Path) -> list[Step]:
    """Return everything that is done where there is a GPU."""
    python, here = sys.executable, HERE
    pytest = [python, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    doctor = ["bash", "-c", 'exec "$0" -m gpucoll.doctor --json > "$1"', python]
    kernels, shared = "tests/kernels/gpu", "tests/calls/gpu/test_shared_gpu.py"
    steps = [
        Step("doctor", [*doctor, str(folder / "doctor.json")], 60, "doctor.json", "doctor"),
        *probes_of_memory(folder),
        Step("tests of kernels", [*pytest, kernels], 120),
        *collectives_of(folder),
        Step("other tests", [*pytest, "tests", f"--ignore={kernels}", f"--ignore={shared}"], 150),
    ]
    for group, limit_s in (
        ("reduce", 60),
        ("cast", 45),
        ("pack", 60),
        ("quantise", 45),
        ("custom", 45),
    ):
        result = f"benchmark_{group}.json"
        command = [python, str(here / "gpu_benchmarks.py"), "--group", group]
        command += ["--output", str(folder / result)]
        steps.append(Step(f"benchmark {group}", command, limit_s, result))
    command = [python, str(here / "gpu_host_cost.py"), "--output", str(folder / "host_cost.json")]
    steps.append(Step("host cost", command, 60, "host_cost.json", "host_cost"))
    has_torch = importlib.util.find_spec("torch") is not None
    peers = "cupy-nccl,torch-nccl" if has_torch else "cupy-nccl"
    sweeps = {"bench": ["--array", "cupy", "--symmetric", "--compare", peers]}
    if has_torch:
        sweeps["bench_torch"] = ["--array", "torch"]
    for key, more in sweeps.items():
        command = [python, "-m", "gpucoll.bench", *SWEEP, *more]
        command += ["--json", str(folder / f"{key}.json")]
        steps.append(Step(key.replace("_", " "), command, 60, f"{key}.json", key))
    listed = [python, "-m", "gpucoll.bench", *LISTED, "--json", str(folder / "bench_list.json")]
    steps.append(Step("bench list", listed, 40, "bench_list.json", "bench_list"))
    steps.append(Step("two ranks on one GPU", [*pytest, shared], 60, may_skip=True))
    if sanitizer := shutil.which("compute-sanitizer"):
        checked = [sanitizer, "--error-exitcode", "9", "--target-processes", "all"]
        chosen = ["-k", SANITIZED, "tests/kernels/gpu/test_on_gpu.py"]
        steps.append(Step("compute-sanitizer", [*checked, *pytest, *chosen], 120))
    return steps


def missing_for(step: Step, environment: dict[str, Any]) -> str:
    """Return why a step cannot run here; empty if it can."""
    missing = environment.get("missing", {})
    needed = ("pytest", "ml_dtypes") if "pytest" in step.command else ()
    names = [name for name in needed if name in missing]
    if step.name == "benchmark custom":
        names += [name for name in ("numba", "numba_cuda") if name in missing]
    return "; ".join(f"{name} does not work here: {missing[name]}" for name in names)


def check(
    folder: Path,
    steps: Callable[[Path], list[Step]] = steps_of,
    limit_s: float = LIMIT_S,
    environment_program: str = ENVIRONMENT,
) -> int:
    """Do every step, write the report after each, print the table; return the exit code."""
    begin = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    link_tree.make()
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    report = Report(date=date)
    file = folder / "environment.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-c", environment_program, str(file)]
    status, elapsed_s, detail = run_watched(command, 90, folder / "environment.log")
    if file.exists():
        report.environment = json.loads(file.read_text(encoding="utf-8"))
    else:
        report.environment = {"no_gpu": f"looking for one {status}: {detail}"}
    report.steps.append(Outcome("environment", status, elapsed_s, detail))
    if reason := report.environment.get("no_gpu"):
        report.status = "no GPU"
        report.write(folder)
        print(f"no GPU: {reason}\nNothing was checked; tools/gpu_check.py needs a GPU and CuPy.")
        return NO_GPU
    for step in steps(folder):
        _do(step, folder, report, limit_s - (time.monotonic() - begin))
        report.write(folder)
    passed = all(outcome.status in ("passed", "left out") for outcome in report.steps)
    report.status = "passed" if passed else "failed"
    report.write(folder)
    print(table(report))
    return OK if passed else FAILED


def _do(step: Step, folder: Path, report: Report, left_s: float) -> None:
    """Run one step and add what it found to the report."""
    if step.backend not in ("", *report.environment.get("backends", ())):
        reason = f"this version has no backend {step.backend}"
        report.steps.append(Outcome(step.name, "left out", 0.0, reason))
        return
    if reason := missing_for(step, report.environment):
        report.steps.append(Outcome(step.name, "not run", 0.0, reason))
        return
    if left_s <= 0:
        report.steps.append(Outcome(step.name, "not run", 0.0, "no time was left"))
        return
    print(f"{step.name} ...", flush=True)
    if step.result:
        (folder / step.result).unlink(missing_ok=True)
    log = folder / f"{step.name.replace(' ', '_')}.log"
    outcome = Outcome(step.name, *run_watched(step.command, min(step.limit_s, left_s), log))
    is_void = "pytest" in step.command and not re.search(rb"\d passed", log.read_bytes())
    if outcome.status == "passed" and is_void and not step.may_skip:
        outcome.status = "failed"  # every test was skipped, and nothing checked
    report.steps.append(outcome)
    if step.result and (folder / step.result).exists():
        try:
            found = json.loads((folder / step.result).read_text(encoding="utf-8"))
        except ValueError:  # it was killed while writing
            return
        before = getattr(report, step.key)
        setattr(report, step.key, [*before, *found] if isinstance(before, list) else found)


def table(report: Report) -> str:
    """Return the report, short."""
    device = report.environment.get("device", {})
    lines = [f"{device.get('name', 'GPU')}, driver {report.environment.get('driver_version')}", ""]
    for row in report.benchmarks:
        wanted = "" if row["target"] is None else f"  wanted {row['target']:g}"
        reached = "" if row["target"] is None or row["ratio"] >= row["target"] else "  MISSED"
        lines.append(
            f"{row['name']:48} {row['rate'] / 1e9:7.0f} GB/s  {row['ratio']:6.2f} x "
            f"{row['against']}{wanted}{reached}"
        )
    lines.append("")
    for row in report.memory:
        lines.append(_line_of_memory(row))
    lines += _lines_of_collectives(report.collectives)
    lines.append("")
    for cost in report.host_cost:
        lines.append(f"{cost['name']:48} {cost['wall_us']:7.2f} us on the host")
    for step in report.steps:
        lines.append(f"{step.name:20} {step.status:8} {step.elapsed_s:6.1f} s  {step.detail[:60]}")
    lines.append(f"\n{report.status}; every number is in gpu_check.json")
    return "\n".join(lines)


def _line_of_memory(row: dict[str, Any]) -> str:
    rate = f"{row['rate'] / 1e9:7.1f} GB/s" if "rate" in row else " " * 12
    return f"{row['name']:48} {rate}  {row['status']} {row['detail'][:80]}".rstrip()


def _lines_of_collectives(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return how many of the calls were right, what was not, and the times."""
    counts = Counter((row["ranks"], row["status"]) for row in rows)
    lines = [f"{ranks} ranks: {count} calls {told}" for (ranks, told), count in counts.items()]
    lines += [
        f"  {row['status']}: {row['name']}, {row['ranks']} ranks: {row['detail'][:100]}"
        for row in rows
        if row["status"] != "passed"
    ][:40]
    lines += [
        f"{row['name']}, {row['ranks']} ranks".ljust(48) + f" {row['time_s'] * 1e6:10.1f} us"
        for row in rows
        if "time_s" in row
    ]
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Check gpucoll on a GPU, in under 8 minutes.")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    return check(parser.parse_args(arguments).output.resolve())


if __name__ == "__main__":
    sys.exit(main())
