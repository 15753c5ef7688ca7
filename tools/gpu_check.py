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
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import link_tree
from gpu_check_steps import SANITIZED, Step, steps_of
from gpu_check_table import table

__all__ = ["SANITIZED", "Report", "Step", "check", "main", "steps_of"]

ROOT = link_tree.ROOT
SCHEMA = 1
LIMIT_S = 460.0
"""Of everything together."""
LEAST_S = 6.0
"""That each step is left by those before it: one that hangs takes no other's place."""
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
    bench_direct: dict[str, Any] = field(default_factory=dict)

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
    wanted = steps(folder)
    for place, step in enumerate(wanted):
        left_s = limit_s - (time.monotonic() - begin)
        after_s = LEAST_S * (len(wanted) - place - 1)
        _do(step, folder, report, left_s, max(left_s - after_s, LEAST_S))
        report.write(folder)
    passed = all(outcome.status in ("passed", "left out") for outcome in report.steps)
    report.status = "passed" if passed else "failed"
    report.write(folder)
    print(table(report))
    return OK if passed else FAILED


def _do(step: Step, folder: Path, report: Report, left_s: float, most_s: float) -> None:
    """Run one step, for so long at most, and add what it found to the report."""
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
    outcome = Outcome(step.name, *run_watched(step.command, min(step.limit_s, left_s, most_s), log))
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


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Check gpucoll on a GPU, in under 8 minutes.")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    return check(parser.parse_args(arguments).output.resolve())


if __name__ == "__main__":
    sys.exit(main())
