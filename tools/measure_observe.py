"""Measure what looking into a job costs: the observer's time, and that of the job.

::

    python tools/measure_observe.py              # 64 ranks, 10 pairs of windows of 2 s
    python tools/measure_observe.py --ranks 16

The first figure is the time to find and map the ranks' memory and to look at it twice, without the
pause between the looks. For the second one, four ranks call all_reduce of 4 bytes all the time, and
count how many calls they make in windows of 2 s. In every other window this process looks at them
once, as `gpucoll why --watch` does. For the third one, two ranks do so, and this process watches
each fourth window, as `gpucoll metrics` does; ranks note calls for 3 s more. The other figures are
the share of a CPU that `gpucoll top` uses at an interval of 1 s, with a screen of 120 x 40: beside
ranks that wait for one of them, and beside ranks that call all the time.
"""

from __future__ import annotations

import argparse
import io
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from gpucoll.observe.look import jobs_of, look
from gpucoll.observe.processes import pids_here
from gpucoll.observe.sampler import Sampler
from gpucoll.observe.screen import View
from gpucoll.observe.segments import find
from gpucoll.observe.verdict import judge
from gpucoll.observe.watch import Watch

STANDS = """
import gpucoll, time
with gpucoll.init() as comm:
    if comm.rank == 1:
        time.sleep(600)
    comm.barrier(timeout_s=900)
"""
CALLS = """
import gpucoll, numpy as np, time
with gpucoll.init() as comm:
    x, until_s, n = np.ones(1, np.float32), time.monotonic() + 1, 0
    while comm.all_reduce(time.monotonic() < 1e18):
        for _ in range(200):
            comm.all_reduce(x, out=x)
        n += 200
        if comm.rank == 0 and time.monotonic() > until_s:
            print(n, flush=True)
            n, until_s = 0, until_s + WINDOW
"""
WINDOW_S = 2.0


def start(program: str, ranks: int, folder: str) -> subprocess.Popen[str]:
    """Start a program on ranks."""
    path = Path(folder) / "program.py"
    path.write_text(program)
    command = [sys.executable, "-m", "gpucoll", "run", "-n", str(ranks), "--no-prefix", str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def look_once(ranks: int) -> float | None:
    """Find the jobs, and look at the one with so many ranks; return the time, in seconds."""
    begun_s = time.perf_counter()
    found = find(pids_here())
    try:
        jobs = [job for job in jobs_of(found.segments) if len(job[0].pids) == ranks]
        for job in jobs:
            judge(look(job, 0.0))
    finally:
        found.close()
    return time.perf_counter() - begun_s if jobs else None


def observer_s(ranks: int) -> float:
    """Return the median time of a look at ranks that wait."""
    with tempfile.TemporaryDirectory() as folder:
        job = start(STANDS, ranks, folder)
        try:
            while look_once(ranks) is None:
                time.sleep(0.5)
            time.sleep(5)
            return statistics.median(filter(None, (look_once(ranks) for _ in range(15))))
        finally:
            job.terminate()
            job.wait()


def slowdown(pairs: int) -> list[float]:
    """Return, for each pair of windows, calls with a look divided by calls without."""
    with tempfile.TemporaryDirectory() as folder:
        job = start(CALLS.replace("WINDOW", str(WINDOW_S)), 4, folder)
        assert job.stdout is not None
        try:
            ratios, counts = [], []
            job.stdout.readline()
            for window in range(2 * pairs):
                if window % 2:
                    look_once(4)
                counts.append(int(job.stdout.readline()))
            for place in range(0, len(counts), 2):
                ratios.append(counts[place + 1] / counts[place])
            return ratios
        finally:
            job.terminate()
            job.wait()


def watched(pairs: int) -> list[float]:
    """Return, for each pair of windows, calls while watched divided by calls while not."""
    with tempfile.TemporaryDirectory() as folder:
        job = start(CALLS.replace("WINDOW", str(WINDOW_S)), 2, folder)
        assert job.stdout is not None
        try:
            ratios = []
            job.stdout.readline()
            for _ in range(pairs):
                before = int(job.stdout.readline())
                found = find(pids_here())
                ours = [each for each in found.segments if each.world_size == 2]
                with Watch(ours) as watch:
                    for _ in range(2):
                        time.sleep(WINDOW_S / 2 - 0.01)
                        watch.read()
                    ratios.append(int(job.stdout.readline()) / before)
                found.close()
                for _ in range(2):
                    job.stdout.readline()
            return ratios
        finally:
            job.terminate()
            job.wait()


def top_share(program: str, ranks: int, seconds: int = 15) -> float:
    """Return the share of a CPU that looks and screens take, one each second."""
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=40)
    with tempfile.TemporaryDirectory() as folder:
        job = start(program, ranks, folder)
        try:
            with Sampler(job.pid) as sampler:
                while sampler.has_ended:  # it has not begun
                    time.sleep(0.5)
                    sampler.find()
                time.sleep(5)
                view, begun_s, used_s = View(), time.monotonic(), time.process_time()
                for _ in range(seconds):
                    time.sleep(1.0)
                    sampler.find()
                    sampler.sample()
                    shown = sampler.snapshot()
                    console.print(view.draw(shown, sampler.calls_of, *console.size))
                assert len(shown.rows) == ranks
                return (time.process_time() - used_s) / (time.monotonic() - begun_s)
        finally:
            job.terminate()
            job.communicate()


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--top", action="store_true", help="measure only `gpucoll top`")
    given = parser.parse_args()
    for what, program in (("wait", STANDS), ("call", CALLS.replace("WINDOW", str(WINDOW_S)))):
        share = top_share(program, given.ranks)
        print(f"gpucoll top, {given.ranks} ranks that {what}: {share:.1%} of a CPU", flush=True)
    if given.top:
        return
    print(
        f"{given.ranks} ranks found, mapped and looked at: {1000 * observer_s(given.ranks):.0f} ms"
    )
    for what, measure in (("with a look", slowdown), ("that are watched", watched)):
        ratios = sorted(measure(given.pairs))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        text = f"median {statistics.median(ratios):.3f}, quartiles {low:.3f} and {high:.3f}"
        print(f"calls in windows {what}, of those in others: {text}", flush=True)


if __name__ == "__main__":
    main()
