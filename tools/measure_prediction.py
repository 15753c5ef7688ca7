"""Measure how well `gpucoll-bench --predict` predicts more ranks, between network namespaces.

    sudo python tools/measure_prediction.py --json bench/results/DATE-prediction.json

Each rank is a host: a namespace whose rate a token bucket limits in both directions. In each
namespace a rank of gpucoll-bench runs, for each number of ranks in turn. The output is one result
with the cases of all of them, for ``--from``, and a table of what was predicted from the cases of
up to 4 ranks. Needs root and iproute2.

Each case is also measured without the token bucket. If that takes more than a third of the time
with it, the case measures this machine's processors and not the network: it is left out of the
table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measure_hosts import LIMIT_S, NAME, hosts, rank_environment

from gpucoll.bench.predict.fitting import Observed
from gpucoll.bench.predict.kept import observed_in
from gpucoll.bench.predict.validation import Validation, held_out_ranks, held_out_sizes
from gpucoll.bench.results import compact

MOST_BUSY = 1 / 3
"""A case counts as bound by the processors if they alone need a larger fraction of its time."""
BUCKET = "burst 16kb latency 500ms"
"""No credit worth mentioning, and room for what several hosts send to one at once."""


def compared(ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the result with the token bucket; its rows tell the times without, too."""
    content = measured(ranks, options.rate, options)
    free = measured(ranks, None, options)
    for row, other in zip(content["results"], free["results"], strict=True):
        row["hosts"] = ranks
        row["unlimited_time"] = other["out_of_place"]["time"]
    return content


def measured(ranks: int, rate: str | None, options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of gpucoll-bench with one rank in each of as many namespaces."""
    with tempfile.TemporaryDirectory() as folder, hosts(ranks, rate, bucket=BUCKET):
        path = Path(folder) / "result.json"
        limits = ["-n", options.reps] if rate else []
        words = [sys.executable, "-m", "gpucoll.bench", "all_reduce", "--json", str(path)]
        words += ["-b", options.first, "-e", options.last, "-f", options.factor]
        words += [*limits, "-w", "1", "--rounds", options.rounds, "--timeout", "120"]
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", f"{NAME}{rank}", *words],
                env=rank_environment(rank, ranks, "eth0"),
                stdout=subprocess.DEVNULL,
            )
            for rank in range(ranks)
        ]
        codes = [process.wait(4 * LIMIT_S) for process in processes]
        if any(codes):
            raise SystemExit(f"{ranks} ranks: exit codes {codes}")
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content


def is_bound_by_cpus(row: Mapping[str, Any]) -> bool:
    """Return whether a case counts as bound by the processors."""
    return bool(row["unlimited_time"] > MOST_BUSY * row["out_of_place"]["time"])


def report(content: Mapping[str, Any]) -> None:
    """Print what was predicted."""
    bound = [row for row in content["results"] if is_bound_by_cpus(row)]
    free = [row for row in content["results"] if row not in bound]
    seen = observed_in({**content, "results": free})
    print(f"{len(bound)} of {len(content['results'])} cases are bound by CPUs and left out:")
    print("  " + ", ".join(f"{row['ranks']} ranks {row['size']} B" for row in bound))
    print_table("ranks held out", held_out_ranks(seen), seen)
    print_table("sizes held out", held_out_sizes(seen), seen)


def print_table(title: str, found: Validation, seen: Sequence[Observed]) -> None:
    """Print a row for each held-out case."""
    print(f"{title}: {len(found.cases)} cases, geometric mean error {found.error:.1%}, ", end="")
    print(f"{found.coverage:.0%} in the 95 % interval; scaled {found.scaled_error:.1%}")
    times = {one.case: one.time_s for one in seen}
    print("ranks".rjust(6), "bytes".rjust(10), "measured us".rjust(12), "error".rjust(8), "covered")
    for case, error, covered in sorted(
        zip(found.cases, found.errors, found.covered, strict=True), key=lambda row: row[0][::-1]
    ):
        print(
            f"{case.ranks:6} {case.size_bytes:10} {times[case] * 1e6:12.0f} {error:8.1%} {covered}"
        )


def main() -> None:
    """Measure, or read what was measured, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,3,4,6,8,12,16", help="between commas")
    parser.add_argument("--rate", default="200mbit", help="rate of each host, in tc's notation")
    parser.add_argument("-b", dest="first", default="16K", help="smallest size")
    parser.add_argument("-e", dest="last", default="16M", help="largest size")
    parser.add_argument("-f", dest="factor", default="2", help="factor between sizes")
    parser.add_argument("-n", dest="reps", default="1", help="calls of a sample")
    parser.add_argument("--rounds", default="5", help="samples of each case")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--read", type=Path, help="do not measure: read this result")
    options = parser.parse_args()
    if options.read:
        report(json.loads(options.read.read_text("utf-8")))
        return
    whole: dict[str, Any] = {}
    for word in options.ranks.split(","):
        content = compared(int(word), options)
        whole.setdefault("environment", content["environment"])
        whole.setdefault("limit", [])
        whole.setdefault("results", []).extend(content["results"])
        print(f"# {word} ranks are measured", file=sys.stderr, flush=True)
    whole["environment"]["network"] = f"namespaces, {options.rate} {BUCKET}"
    whole["environment"]["command"] = " ".join(["tools/measure_prediction.py", *sys.argv[1:]])
    if options.json:
        options.json.write_text(compact(json.dumps(whole, indent=1)) + "\n", encoding="utf-8")
    report(whole)


if __name__ == "__main__":
    main()
