"""Run PyTorch's tests from the command line; `--help` says how."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.integrations.torch.suite.not_passing import differences, listed
from tests.integrations.torch.suite.running import Outcome, run

PROGRAM = "tests.integrations.torch.suite"


def main() -> int:
    """Run what was asked for; return 1 if something is not as listed in `not_passing`."""
    given = arguments()
    if given.beside or len(given.ranks) > 1:
        return compared(given)
    (world_size,) = given.ranks
    outcomes = run(given.backend, world_size, given.k, sys.stdout)
    if given.verbose:
        for each in outcomes:
            if each.output:
                print(f"--- {each.test}\n{each.output}")
    skipped = Counter(each.reason for each in outcomes if each.outcome == "skipped")
    for reason, count in skipped.most_common():
        print(f"skipped {count}: {reason}")
    if given.json:
        given.json.write_text(json.dumps([dataclasses.asdict(each) for each in outcomes], indent=1))
    print(f"{world_size} ranks: {given.backend} {summary(outcomes)}")
    if given.k or given.backend != "gpucoll":
        return 0
    lines = differences(world_size, outcomes)
    for test, reason in listed(world_size).items():
        print(f"listed: {test}: {reason}")
    print("as listed" if not lines else "\n".join(["not as listed:", *lines]))
    return int(bool(lines))


def compared(given: argparse.Namespace) -> int:
    """Run backends at numbers of ranks, each in a process of its own; print their counts."""
    status = 0
    for world_size in given.ranks:
        counts = []
        for backend in (given.backend, *given.beside):
            with tempfile.NamedTemporaryFile(suffix=".json") as file:
                command = [sys.executable, "-m", PROGRAM, "--backend", backend]
                command += ["--ranks", str(world_size), "--json", file.name, "-k", given.k]
                command += ["-v"] * given.verbose
                status |= subprocess.run(command, check=False).returncode
                counts.append(f"{backend} {summary(read(Path(file.name)))}")
        print(f"{world_size} ranks: {', '.join(counts)}", flush=True)
    return status


def read(path: Path) -> list[Outcome]:
    """Return the outcomes that a run has written."""
    return [Outcome(**each) for each in json.loads(path.read_text() or "[]")]


def summary(outcomes: Iterable[Outcome]) -> str:
    """Count what passed, of what ran."""
    counts = Counter(each.outcome for each in outcomes)
    return f"{counts['passed']} of {counts['passed'] + counts['failed']} passed"


def arguments() -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}",
        description="Run PyTorch's own tests of torch.distributed against a backend.",
    )
    parser.add_argument("--backend", default="gpucoll", metavar="NAME")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], metavar="N")
    parser.add_argument(
        "--beside", nargs="+", default=[], metavar="NAME", help="other backends, to count for each"
    )
    parser.add_argument("-k", default="", metavar="TEXT", help="only tests with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write how each test went")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print what failed ranks wrote"
    )
    given = parser.parse_args()
    if given.json and (given.beside or len(given.ranks) > 1):
        parser.error("--json is for one backend at one number of ranks")
    return given


if __name__ == "__main__":
    sys.exit(main())
