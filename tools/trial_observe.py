"""Try `gpucoll why` on jobs that seeds draw.

It must name the right rank of those that hang, and raise no alarm on those that are healthy::

    python tools/trial_observe.py                        # all parts: an hour
    python tools/trial_observe.py attaches               # 10,000 to jobs that come and go
    python tools/trial_observe.py hangs --count 40 --seed 7
    python tools/trial_observe.py hangs --kind circle --only 12

A hang counts as right if the first verdict that calls for a look, after the last rank has come to
the step at which it hangs, names the right rank and no other. Most jobs have 2 to 16 ranks, every
eighth 32 or 64. What `gpucoll why` would have printed of the others is kept in a file each.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests' jobs

from tests.observe.attaching import attach_often, left_over  # noqa: E402
from tests.observe.jobs import (  # noqa: E402
    HANGS,
    HEALTHY,
    Alarm,
    Trial,
    false_alarm,
    first_alarm,
    hanging,
    healthy,
)
from tests.ranks import Pools, RankServer  # noqa: E402

from gpucoll.observe.text import lines_of  # noqa: E402
from gpucoll.observe.verdict import PATIENCE_S  # noqa: E402

SIZES = (2, 3, 4, 5, 6, 8, 12, 16)
LARGE_SIZES = (32, 64)


def trials(
    kinds: Iterable[str], make: Callable[..., Trial], given: argparse.Namespace
) -> Iterator[tuple[int, Trial]]:
    """Yield numbered jobs, of all kinds in turn."""
    chosen = [kind for kind in kinds if not given.kind or kind in given.kind]
    for number in range(given.count):
        if given.only is None or number in given.only:
            draw = random.Random(f"{given.seed} {number}")
            n_ranks = draw.choice(LARGE_SIZES if number % 8 == 7 else SIZES)
            yield number, make(chosen[number % len(chosen)], given.seed * 10_000 + number, n_ranks)


class Table:
    """How the jobs of each kind came out."""

    def __init__(self, title: str, outcomes: tuple[str, ...], kept: Path) -> None:
        self._title, self._outcomes, self._kept = title, outcomes, kept
        self._counts = Counter[tuple[str, str]]()

    def add(self, number: int, trial: Trial, outcome: str, alarm: Alarm, took_s: float) -> None:
        """Count a job; write down what was said of it if it did not come out well."""
        self._counts[trial.kind, outcome] += 1
        print(f"{number:4} {trial.kind:12} {trial.n_ranks:3} ranks {outcome} {took_s:.1f} s")
        if outcome == self._outcomes[0]:
            return
        lines = [f"{trial.verdicts} {[*map(sorted, trial.sides)]} would be right."]
        if alarm is not None:
            lines += [f"The verdict: {alarm[0]}", "", *lines_of(alarm[1], alarm[0], {}, False)]
        path = self._kept / f"{self._title}-{number}-{trial.kind}.txt"
        path.write_text("\n".join(map(str, [*lines, "", *trial.scripts])) + "\n")
        print(f"     {lines[0]} {alarm and alarm[0]}\n     kept in {path}", flush=True)

    def show(self) -> bool:
        """Print the table; return whether at least 99 % came out well."""
        kinds = list(dict.fromkeys(kind for kind, _ in self._counts))
        print(f"\n{self._title:12}" + "".join(f"{outcome:>14}" for outcome in self._outcomes))
        for kind in [*kinds, "all"]:
            of = kinds if kind == "all" else [kind]
            counts = [sum(self._counts[each, how] for each in of) for how in self._outcomes]
            print(f"{kind:12}" + "".join(f"{count:14}" for count in counts), flush=True)
        return counts[0] >= 0.99 * sum(counts)


def try_hangs(given: argparse.Namespace, kept: Path) -> bool:
    """Let jobs hang, each on ranks of its own."""
    table = Table("hangs", ("right", "wrong", "missed"), kept)
    with contextlib.closing(RankServer()) as server:
        for number, trial in trials(HANGS, hanging, given):
            begun_s = time.monotonic()
            pool = server.fork(trial.n_ranks)
            with pool:
                alarm = first_alarm(pool, trial, kept / "marks", given.patience)
                pool.kill()
            is_right = alarm is not None and trial.is_right(alarm[0])
            outcome = "right" if is_right else "wrong" if alarm else "missed"
            table.add(number, trial, outcome, alarm, time.monotonic() - begun_s)
    return table.show()


def try_healthy(given: argparse.Namespace, kept: Path) -> bool:
    """Play jobs that end well, and look at them all the time."""
    table = Table("healthy", ("no alarm", "false alarm"), kept)
    with contextlib.closing(RankServer()) as server:
        pools = Pools(server)
        for number, trial in trials(HEALTHY, healthy, given):
            begun_s = time.monotonic()
            alarm = false_alarm(pools.pool(trial.n_ranks), trial, kept / "marks", given.patience)
            outcome = "false alarm" if alarm else "no alarm"
            table.add(number, trial, outcome, alarm, time.monotonic() - begun_s)
        pools.close()
    return table.show()


def try_attaches(given: argparse.Namespace, kept: Path) -> bool:
    """Attach 50 times as often as there are jobs in the other parts, to jobs that come and go."""
    attached = number = 0
    with contextlib.closing(RankServer()) as server:
        gc.collect()
        before = left_over()
        for attached in attach_often(server, 50 * given.count, given.seed, kept):
            number += 1
            print(f"{number} jobs, {attached} attaches", flush=True)
        gc.collect()
        after = left_over()
    print(f"\n{attached} attaches to {number} jobs, whose results were right")
    print(f"descriptors and mappings of the observer: {before} before, {after} after", flush=True)
    return after == before


PARTS = {"hangs": try_hangs, "healthy": try_healthy, "attaches": try_attaches}


def main() -> int:
    """Run the parts that were asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS])
    parser.add_argument("--count", type=int, default=200, help="jobs of each part")
    parser.add_argument("--seed", type=int, default=36)
    parser.add_argument("--kind", action="append", help="only jobs of this kind")
    parser.add_argument("--only", type=int, action="append", help="only the job of this number")
    parser.add_argument("--patience", type=float, default=PATIENCE_S)
    parser.add_argument("--keep", type=Path, help="folder for what was said wrongly")
    given = parser.parse_args()
    kept = given.keep or Path(tempfile.mkdtemp(prefix="trial_observe."))
    kept.mkdir(parents=True, exist_ok=True)
    return int(any(not PARTS[part](given, kept) for part in given.parts or PARTS))


if __name__ == "__main__":
    sys.exit(main())
