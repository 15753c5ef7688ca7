"""Seed one-line faults into the code, and count which of them the tests catch.

::

    python tools/mutations.py make --count 150 --seed 28 -o faults.json
    python tools/mutations.py run faults.json --tier quick -o results.json
    python tools/mutations.py report results.json

`run` puts each fault into a copy of the checkout and runs the nearest tests there. Faults that
these do not catch then go through the whole tier, eight at a time: a test that fails is repeated
with each fault alone, and the tier goes on with the others. Results are written after each fault;
``--resume`` goes on, also with a longer tier, which gets only what the shorter one did not catch.
Every run has a limit, after which all its processes are killed.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mutation_faults
from mutation_faults import KINDS, Fault, MissingError
from mutation_runs import Tree, nearest_tests

ROOT = Path(__file__).resolve().parent.parent
AT_ONCE = 8
"""Faults in one tree when the whole tier runs."""
CAUGHT = ("test", "timeout", "start")
"""Outcomes: a test failed, a test did not end, pytest did not start."""


class Results:
    """The outcome of each fault in each tier, in a file that is always whole.

    Parameters
    ----------
    path : Path
        The file.
    faults : list of Fault
        All faults; those of an existing file count.
    """

    def __init__(self, path: Path, faults: Sequence[Fault]) -> None:
        self._path = path
        self._lock = threading.Lock()
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.faults = [Fault(**each) for each in found.get("faults", map(asdict, faults))]
        self.outcomes: dict[str, dict[str, dict[str, Any]]] = found.get("outcomes", {})
        self.failing: dict[str, list[str]] = found.get("failing without faults", {})
        self.unexplained: list[dict[str, Any]] = found.get("unexplained", [])

    def write(self) -> None:
        """Replace the file."""
        content = {
            "faults": [asdict(fault) for fault in self.faults],
            "outcomes": self.outcomes,
            "failing without faults": self.failing,
            "unexplained": self.unexplained,
        }
        new = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        new.replace(self._path)

    def note(
        self, tier: str, fault: Fault, outcome: str, by: str, stage: str, took_s: float
    ) -> None:
        """Note what became of a fault, and by which test."""
        number = self.faults.index(fault)
        with self._lock:
            noted = {"outcome": outcome, "by": by, "stage": stage, "took_s": round(took_s, 1)}
            self.outcomes.setdefault(str(number), {})[tier] = noted
            self.write()
            done = sum(tier in each for each in self.outcomes.values())
        by = f" by {by}" if by else ""
        print(f"{done:4} {stage:8} {outcome}{by} ({took_s:.0f} s): {fault.place}", flush=True)

    def outcome(self, fault: Fault, tier: str) -> str:
        """Return the outcome of a fault in a tier; empty: none yet.

        What the quick tier catches, all tiers together catch.
        """
        noted = self.outcomes.get(str(self.faults.index(fault)), {})
        quick = noted.get("quick", {}).get("outcome", "")
        if tier == "all" and quick in CAUGHT:
            return str(quick)
        return str(noted.get(tier, {}).get("outcome", ""))


class Campaign:
    """Runs of tests over the faults of a file."""

    def __init__(self, options: argparse.Namespace, results: Results, work: Path) -> None:
        self._options, self._results, self._work = options, results, work
        self._tier: str = options.tier
        self._arguments: list[str] = shlex.split(options.pytest_arguments)
        if self._tier != "quick":
            self._arguments += ["--tier", self._tier]
        self._trees: queue.Queue[Tree] = queue.Queue()
        for number in range(options.jobs):
            self._trees.put(self._new_tree(str(number)))
        self._clean = self._new_tree("clean")
        self._left_out = results.failing.setdefault(self._tier, [])
        self._clean_lock = threading.Lock()
        self._sound: set[str] = set()

    def _new_tree(self, name: str) -> Tree:
        place = self._work / name
        place.mkdir()
        return Tree(self._options.tree, place, self._options.test_limit_s)

    def prepare(self) -> None:
        """Compile everything once, without faults, and see that pytest takes its arguments."""
        print("compiling without faults ...", flush=True)
        if not self._clean.fill_cache():
            raise SystemExit("mutations: the tests' ranks cannot be prepared without faults")
        ran = self._clean.pytest(["--collect-only", *self._arguments], 600.0)
        if ran.failed or ran.code:
            raise SystemExit(f"mutations: pytest cannot collect:\n{self._clean.output[-2000:]}")

    def run(self) -> None:
        """Give every fault without an outcome one."""
        while True:
            self._in_parallel([[fault] for fault in self._left()], self._nearest)
            if not self._forget_failing_without_faults():
                break
        left = [fault for fault in self._results.faults if self._is_undecided(fault)]
        if not self._options.only_nearest:
            groups = [left[n : n + AT_ONCE] for n in range(0, len(left), AT_ONCE)]
            self._in_parallel(groups, self._whole_tier)

    def _left(self) -> list[Fault]:
        faults = self._results.faults[: self._options.first]
        return [fault for fault in faults if not self._results.outcome(fault, self._tier)]

    def _is_undecided(self, fault: Fault) -> bool:
        return self._results.outcome(fault, self._tier) == "undecided"

    def _in_parallel(
        self, groups: list[list[Fault]], work: Callable[[Tree, list[Fault]], None]
    ) -> None:
        def one(group: list[Fault]) -> None:
            tree = self._trees.get()
            try:
                work(tree, group)
            finally:
                self._trees.put(tree)

        with ThreadPoolExecutor(self._options.jobs) as pool:
            for future in [pool.submit(one, group) for group in groups]:
                future.result()

    def _put(self, tree: Tree, faults: Sequence[Fault]) -> None:
        tree.put(faults)
        tree.fill_cache(self._clean)

    def _nearest(self, tree: Tree, faults: list[Fault]) -> None:
        """Run the nearest tests of one fault."""
        begin_s, outcome, test = time.monotonic(), "undecided", ""
        doubtful: list[str] = []
        try:
            self._put(tree, faults)
            tests = nearest_tests(tree.root, faults[0].file)
        except MissingError:
            outcome, tests = "gone", []
        while tests:
            leave_out = [*self._left_out, *doubtful]
            ran = tree.pytest(["-x", *self._arguments, *tests], self._options.limit_s, leave_out)
            if ran.is_sound:
                break
            if not ran.verdict[1] or self._fails(tree, ran.verdict[1]):
                outcome, test = ran.verdict
                break
            doubtful.append(ran.verdict[1])
        self._note(faults[0], outcome, test, "nearest", begin_s)

    def _fails(self, tree: Tree, test: str) -> bool:
        """Return whether a test fails alone, at the first or the second time."""
        arguments = [*self._arguments, test]
        return any(not tree.pytest(arguments, self._options.limit_s).is_sound for _ in range(2))

    def _forget_failing_without_faults(self) -> bool:
        """Forget what was caught by tests that fail without faults, too; return whether any was."""
        noted = [each for each in self._results.outcomes.values() if self._tier in each]
        new = {each[self._tier]["by"] for each in noted} - {"", *self._sound}
        failing = self._failing_without_faults(sorted(new))
        self._sound |= new - failing
        for each in noted:
            if each[self._tier]["by"] in failing:
                del each[self._tier]
        return bool(failing)

    def _failing_without_faults(self, tests: list[str]) -> set[str]:
        """Return the tests that fail without faults, and leave them out from now on."""
        if not tests:
            return set()
        with self._clean_lock:
            ran = self._clean.pytest([*self._arguments, *tests], self._options.tier_limit_s)
            failing = {name for _, name in ran.failed} & {*tests}
            self._left_out += sorted(failing - {*self._left_out})
        for name in sorted(failing):
            print(f"fails without faults, left out: {name}", flush=True)
        return failing

    def _whole_tier(self, tree: Tree, group: list[Fault]) -> None:
        """Run the whole tier with several faults, as often as one of them is caught."""
        begin_s, left = time.monotonic(), [*group]
        done: set[str] = set()
        while left:
            self._put(tree, left)
            arguments = ["-x", "-n", "4", "--dist", "loadfile", *self._arguments]
            ran = tree.pytest(arguments, self._options.tier_limit_s, [*done, *self._left_out])
            done |= ran.passed
            outcome, test = ran.verdict
            if ran.is_sound:
                outcome = "unfinished" if ran.stopped else "survived"
            elif test and self._failing_without_faults([test]):
                continue
            elif test and (caught := self._caught_by(tree, left, test)):
                self._note(caught, outcome, test, "tier", begin_s)
                left.remove(caught)
                continue
            elif test:  # no fault alone makes it fail
                places = [fault.place for fault in left]
                self._results.unexplained.append({"test": test, "faults": places})
                done.add(test)
                continue
            elif len(left) > 1:  # no test to search with
                self._whole_tier(tree, left[: len(left) // 2])
                self._whole_tier(tree, left[len(left) // 2 :])
                return
            for fault in left:
                self._note(fault, outcome, "", "tier", begin_s)
            return

    def _caught_by(self, tree: Tree, faults: list[Fault], test: str) -> Fault | None:
        """Return the first fault that a test catches alone."""
        for fault in faults:
            self._put(tree, [fault])
            if self._fails(tree, test):
                return fault
        return None

    def _note(self, fault: Fault, outcome: str, test: str, stage: str, begin_s: float) -> None:
        took_s = time.monotonic() - begin_s
        self._results.note(self._tier, fault, outcome, test, stage, took_s)


# --- the report -----------------------------------------------------------------------------------


def report(results: Results) -> Iterator[str]:
    """Yield the lines of the table by kind and tier, and of the faults that survived."""
    tiers = [tier for tier in ("quick", "all") if any(tier in x for x in results.outcomes.values())]
    yield "| kind | faults |" + "".join(f" {tier} | of these by timeout |" for tier in tiers)
    yield "|---|---:|" + "---:|---:|" * len(tiers)
    for kind in (*KINDS, "all kinds"):
        faults = [fault for fault in results.faults if kind in (fault.kind, "all kinds")]
        cells = [kind, str(len(faults))]
        for tier in tiers:
            outcomes = [results.outcome(fault, tier) for fault in faults]
            outcomes = [each for each in outcomes if each not in ("", "gone")]
            caught = sum(each in CAUGHT for each in outcomes)
            share = f" ({100 * caught / len(outcomes):.0f} %)" if outcomes else ""
            cells += [f"{caught} of {len(outcomes)}{share}", str(outcomes.count("timeout"))]
        yield "| " + " | ".join(cells) + " |"
    for tier in tiers:
        for name in ("survived", "undecided", "unfinished", "gone"):
            found = [each for each in results.faults if results.outcome(each, tier) == name]
            yield from [f"\n{tier}: {len(found)} {name}"] if found else []
            for fault in found:
                yield f"\n{fault.place} {fault.function} ({fault.kind})"
                yield from (f"- {line}" for line in fault.old.split("\n"))
                yield from (f"+ {line}" for line in fault.new.split("\n"))


# --- the command line -----------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    options = _parser().parse_args(arguments)
    if options.command == "make":
        faults = mutation_faults.draw(options.tree, options.count, options.seed)
        text = json.dumps([asdict(fault) for fault in faults], indent=1)
        options.output.write_text(text + "\n", encoding="utf-8")
        print(f"{len(faults)} faults in {options.output}")
    elif options.command == "report":
        print("\n".join(report(Results(options.results, ()))))
    else:
        if options.output.exists() and not options.resume:
            raise SystemExit(f"mutations: {options.output} exists: --resume goes on with it")
        loaded = json.loads(options.faults.read_text(encoding="utf-8"))
        results = Results(options.output, [Fault(**each) for each in loaded])
        with tempfile.TemporaryDirectory(prefix="gm-") as work:
            Path(work).chmod(0o755)  # tests start processes of other users
            campaign = Campaign(options, results, Path(work))
            campaign.prepare()
            campaign.run()
        print("\n".join(report(results)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Seed faults, and count which the tests catch.")
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="draw faults from the code")
    make.add_argument("--count", type=int, default=150)
    make.add_argument("--seed", type=int, default=28)
    make.add_argument("-o", "--output", type=Path, required=True)
    run = commands.add_parser("run", help="run the tests with each fault")
    run.add_argument("faults", type=Path)
    run.add_argument("-o", "--output", type=Path, required=True)
    run.add_argument("--resume", action="store_true", help="go on with the results in the output")
    run.add_argument("--tier", choices=["quick", "all"], default="quick")
    run.add_argument("--jobs", type=int, default=1, help="trees at once")
    run.add_argument("--first", type=int, help="only the first faults of the file")
    run.add_argument("--only-nearest", action="store_true", help="leave out the whole tier")
    run.add_argument("--pytest-arguments", default="", help="further arguments, in one word")
    limits = {"limit": 240, "test-limit": 120, "tier-limit": 5400}
    texts = ("for the nearest tests of a fault", "for one test", "for the whole tier")
    for (name, default), text in zip(limits.items(), texts, strict=True):
        run.add_argument(f"--{name}-s", type=float, default=default, help=f"seconds {text}")
    for command in (make, run):
        command.add_argument("--tree", type=Path, default=ROOT, help="another checkout")
    shown = commands.add_parser("report", help="print the shares, and the faults that survived")
    shown.add_argument("results", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
