"""Check gpucoll on a GPU: probes, calls, tests, speed, compute-sanitizer. Ten minutes a command.

::

    python tools/gpu_check.py --output results
    python tools/gpu_check.py --output more --again results/gpu_check.json    # what was left

It needs one GPU and the machine's own CuPy, NumPy, Numba, pytest and ml_dtypes. It uses PyTorch,
JAX, mpi4py and numba-cuda if they are installed. It needs no network and no installation, since it
uses gpucoll through the link tree. The first step compiles what all others need.

Each step runs in its own process. If its time is over or the disk is full, this process is killed
with all that it has started. After each step, two files in ``DIR`` are rewritten:
``gpu_check.json`` with all results and the last 100 lines of every step that did not pass, and
``gpu_check.tar.gz`` with the complete output of the steps. So even a step that brings the machine
down loses no earlier results. A step begins only if its time limit fits into what is left of the
ten minutes.

``--again FILE`` continues the report of an earlier run: it runs the steps that were killed or did
not begin, and keeps the other results. ``--only NAME ...`` runs the steps with these names
(``"memory*"`` for several) and the steps that prepare them; ``--list`` prints all names. Steps
that measure neither times nor memory run side by side, ``--jobs`` at a time.

If the source of NCCL (2.30 or newer) is in ``build/nccl``, the last steps build it for this GPU,
with few functions, and try two ranks on one GPU, which older releases refuse. A copy built
elsewhere, ``build/nccl/build/lib/libnccl.so.2``, is enough as well.

The exit code is 0 if everything passed, 1 if something failed or could not run, 2 if there is no
GPU.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import link_tree
from gpu_check_process import Ended, last_lines, run_watched
from gpu_check_report import Keeper, Outcome, Report
from gpu_check_steps import SANITIZED, Step, steps_of
from gpu_check_table import table

__all__ = ["SANITIZED", "Report", "Step", "check", "main", "steps_of"]

LIMIT_S = 560.0
"""Limit of all steps together. The rest of the ten minutes is for ending steps that hang."""
JOBS = max(1, (os.cpu_count() or 1) // 4)
"""How many steps run side by side: each has up to four ranks."""
FAILED_LINES = 100
"""How many lines of output the report contains of a step that did not pass."""
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


class Check:
    """One run of steps.

    Parameters
    ----------
    folder : Path
        The folder of the two result files.
    limit_s : float
        The time limit of all steps together.
    again : Path, optional
        The report of an earlier run to complete.
    jobs : int
        How many steps that measure nothing run at the same time.
    """

    def __init__(
        self, folder: Path, limit_s: float = LIMIT_S, again: Path | None = None, jobs: int = 1
    ) -> None:
        self._until = time.monotonic() + limit_s
        self._jobs, self._lock = jobs, threading.Lock()
        self.report = Report() if again is None else Report.read(again)
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.report.runs.append({"date": date, "environment": {}})
        self.report.status = "running"
        folder.mkdir(parents=True, exist_ok=True)
        self.work = Path(tempfile.mkdtemp(prefix="gpu_check."))
        self._keeper = Keeper(folder, self.work)

    def __enter__(self) -> Check:
        return self

    def __exit__(self, *_: object) -> None:
        self._keeper.close()
        shutil.rmtree(self.work, ignore_errors=True)

    def look(self, environment_program: str) -> str:
        """Examine the machine; return why it has no usable GPU, empty if it has one."""
        file = self.work / "environment.json"
        command = [sys.executable, "-c", environment_program, str(file)]
        log = self.work / "environment.log"
        ended = run_watched(command, 90, log)
        found = _json_of(file) or {"no_gpu": f"looking for one {ended.status}: {ended.detail}"}
        self.report.runs[-1]["environment"] = found
        self._note("environment", ended, log)
        return str(found.get("no_gpu", ""))

    def do_all(self, steps: Iterable[Step]) -> None:
        """Run steps in their order: those that measure something alone, others side by side."""
        for is_timed, group in itertools.groupby(steps, lambda step: step.is_timed):
            with ThreadPoolExecutor(1 if is_timed else self._jobs) as threads:
                list(threads.map(self.do, group))

    def do(self, step: Step) -> None:
        """Run a step, and add its result to the report."""
        reason = missing_for(step, self.report.environment)
        left_s = self._until - time.monotonic()
        if not reason and step.limit_s > left_s:
            reason = f"it may take {step.limit_s:g} s, and {max(left_s, 0):.0f} were left"
        if reason:
            self._add(Outcome(step.name, "not run", 0.0, reason))
            return
        print(f"{step.name} ...", flush=True)
        log = self.work / f"{step.name.replace(' ', '_')}.log"
        ended = run_watched(step.command, step.limit_s, log)
        is_void = "pytest" in step.command and not re.search(rb"\d passed", log.read_bytes())
        if ended.status == "passed" and is_void and not step.may_skip:
            # every test was skipped, so nothing was checked
            ended = ended._replace(status="failed")
        if step.result and (found := _json_of(self.work / step.result)) is not None:
            self.report.results[step.name] = found
        self._note(step.name, ended, log)

    def finish(self) -> None:
        """Record the overall result."""
        self.report.finish()
        self._keeper.write(self.report)

    def _note(self, name: str, ended: Ended, log: Path) -> None:
        lines = [] if ended.status == "passed" else last_lines(log, FAILED_LINES)
        self._add(Outcome(name, *ended, lines))

    def _add(self, outcome: Outcome) -> None:
        with self._lock:
            self.report.add(outcome)
            self._keeper.write(self.report)


def missing_for(step: Step, environment: dict[str, Any]) -> str:
    """Return why a step cannot run here; empty if it can."""
    missing = environment.get("missing", {})
    names = [name for name in step.needs if name in missing]
    return "; ".join(f"{name} does not work here: {missing[name]}" for name in names)


def check(
    folder: Path,
    steps: Callable[[Path], list[Step]] = steps_of,
    limit_s: float = LIMIT_S,
    environment_program: str = ENVIRONMENT,
    only: Sequence[str] = (),
    again: Path | None = None,
    jobs: int = 1,
) -> int:
    """Do the steps, write the report after each, print the table; return the exit code."""
    link_tree.make()
    with Check(folder, limit_s, again, jobs) as run:
        reason = run.look(environment_program)
        if reason:
            run.finish()
            print(
                f"no GPU: {reason}\nNothing was checked; tools/gpu_check.py needs a GPU and CuPy."
            )
            return NO_GPU
        run.do_all(
            step
            for step in steps(run.work)
            if step.is_preparation or _is_wanted(step.name, run.report, only)
        )
        run.finish()
        print(table(run.report))
        return OK if run.report.status == "passed" else FAILED


def _is_wanted(name: str, report: Report, only: Sequence[str]) -> bool:
    if only:
        return any(fnmatch.fnmatch(name, pattern) for pattern in only)
    return not report.is_finished(name)


def _json_of(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the file was not written, or not completely
        return None


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Check gpucoll on a GPU, in under ten minutes.")
    parser.add_argument("--output", type=Path, metavar="DIR")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="these steps alone")
    parser.add_argument("--again", type=Path, metavar="FILE", help="complete an earlier report")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS")
    parser.add_argument("--jobs", type=int, default=JOBS, metavar="N", help="steps side by side")
    parser.add_argument("--list", action="store_true", help="print the steps and their limits")
    given = parser.parse_args(arguments)
    if given.list:
        for step in steps_of(Path()):
            print(f"{step.name:32} {step.limit_s:4.0f} s")
        return OK
    if given.output is None:
        parser.error("--output is needed")
    folder = given.output.resolve()
    return check(folder, limit_s=given.limit, only=given.only, again=given.again, jobs=given.jobs)


if __name__ == "__main__":
    sys.exit(main())
