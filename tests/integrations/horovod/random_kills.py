"""Kills ranks of elastic training at random moments, and compares the result with one process's.

    python tests/integrations/horovod/random_kills.py 500 SEED

Half of the kills are of jobs of 8 ranks that only shrink, the others of jobs of 4 ranks whose lost
ranks are replaced. A rank is killed when the others are at least two that may go on without it:
there is one kill at a time. Prints a line for each job, and how many kills there were.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PROGRAM = Path(__file__).with_name("programs") / "elastic_training.py"
STEPS = 1_000_000
LIMIT_S = 60.0
"""How long a change of ranks may take here, where many jobs share the CPUs."""
YOUNG_S = 5.5
"""The launcher pauses before it replaces processes that fail sooner after their start."""


@dataclass
class Job:
    """A running job, as what it prints tells."""

    process: subprocess.Popen[str]
    members: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """Number of changes -> process -> number of ranks."""
    first_seen_s: dict[int, float] = field(default_factory=dict)
    killed: set[int] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    has_ended: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def read(self) -> None:
        """Take in what the job prints until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.changed:
                self.lines.append(line)
                words = line.split()
                if words and words[0] == "member":
                    process, change, size = map(int, words[1:])
                    self.members[change][process] = size
                    self.first_seen_s.setdefault(process, time.monotonic())
                self.changed.notify_all()
        with self.changed:
            self.has_ended = True
            self.changed.notify_all()

    def wait_for(self, after: int, least: int) -> tuple[int, list[int]]:
        """Return a change after this one that all its ranks have seen, and their processes.

        None of them was killed.
        """

        def complete() -> tuple[int, list[int]] | None:
            for change, seen in sorted(self.members.items(), reverse=True):
                size = next(iter(seen.values()))
                lives = not self.killed.intersection(seen)
                if change > after and len(seen) == size >= least and lives:
                    return change, list(seen)
            return None

        with self.changed:
            self.changed.wait_for(lambda: self.has_ended or complete(), LIMIT_S)
            found = complete()
        if found is None or self.has_ended:
            raise RuntimeError(f"no change after {after}:\n{''.join(self.lines[-60:])}")
        return found


@contextmanager
def started(ranks: int, restarts: int, stop: Path) -> Iterator[Job]:
    """Run a job; end it, whatever happens."""
    command = [sys.executable, "-m", "gpucoll", "run", "--no-prefix", "--elastic", f"2:{ranks}"]
    command += ["--restarts", str(restarts), "-m", "gpucoll.integrations.horovod", str(PROGRAM)]
    process = subprocess.Popen(
        [*command, str(STEPS)],
        env={**os.environ, "STOP": str(stop), "PAUSE_S": "0.001"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    job = Job(process)
    reader = threading.Thread(target=job.read, daemon=True)
    reader.start()
    try:
        yield job
        process.wait(LIMIT_S)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
        reader.join(10)
        assert process.stdout is not None
        process.stdout.close()


def run_job(ranks: int, kills: int, restarts: int, chance: random.Random) -> dict[str, object]:
    """Kill so many ranks of one job, one after the other; return what the job says at its end."""
    with tempfile.TemporaryDirectory() as folder:
        stop = Path(folder) / "stop"
        with started(ranks, restarts, stop) as job:
            change = -1
            for _ in range(kills):
                change, processes = job.wait_for(change, 3)
                now = time.monotonic()
                old = [p for p in processes if now - job.first_seen_s[p] > YOUNG_S]
                if restarts and len(old) < 2:
                    time.sleep(chance.uniform(0.5, 1.5))
                time.sleep(chance.uniform(0.0, 0.05))
                process = chance.choice(old if restarts and old else processes)
                job.killed.add(process)
                os.kill(process, signal.SIGKILL)
            job.wait_for(change, 2)
            stop.touch()
        told = [line for line in job.lines if line.startswith("{")]
        if job.process.returncode or not told:
            raise RuntimeError("".join(job.lines[-60:]))
        return dict(json.loads(told[-1]))


def main(n_kills: int, seed: int) -> int:
    """Return the number of kills; the first job that goes wrong raises."""
    chance = random.Random(seed)
    done, grows = 0, False
    while done < n_kills:
        ranks, kills, restarts = (4, 6, 1000) if grows else (8, 5, 0)
        kills = min(kills, n_kills - done)
        begin_s = time.monotonic()
        result = run_job(ranks, kills, restarts, chance)
        if not result["right"]:
            raise AssertionError(f"other weights than one process's: {result}")
        done, grows = done + kills, not grows
        took_s = time.monotonic() - begin_s
        print(f"{done} kills; the last {kills} of {ranks} ranks: right, {took_s:.1f} s", flush=True)
    return done


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
