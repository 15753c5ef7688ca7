"""The table that tools/gpu_check.py prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from gpu_check_report import UNFINISHED

__all__ = ["lines_of_direct", "table"]

MOVED_BY_TWO = 10
"""Bytes that an all_reduce of two ranks on one GPU must read and write there for each byte of an
array: each rank copies it (2) and combines two arrays into a third one (3)."""
PROBES = ("memory", "streams", "nccl", "direct sweep", "a rank is killed")
"""Steps whose rows are shown individually."""
CHECKS = ("collectives", "torch", "arrays")
"""Steps whose rows are counted; rows that did not pass are shown."""
MOST_SHOWN = 40
DIRECT_TARGET = 0.7
"""The target of the largest all_reduce: the fraction of the speed that those bytes allow."""


def table(report: Any) -> str:
    """Return a summary of the report."""
    found = report.environment
    name = found.get("device", {}).get("name", "GPU")
    lines = [f"{name}, driver {found.get('driver_version')}", ""]
    lines += [_line_of_benchmark(row) for row in rows_of(report.results, "benchmark")]
    for kind in PROBES:
        lines += ["", *map(_line_of_probe, rows_of(report.results, kind))]
    lines.append("")
    for name, rows in report.results.items():
        if name.startswith(CHECKS):
            lines += _lines_of_checks(name, rows)
    lines += ["", *lines_of_direct(report.results.get("bench direct", {}))]
    for cost in rows_of(report.results, "host cost"):
        lines.append(f"{cost['name']:48} {cost['wall_us']:7.2f} us on the host")
    for step in report.steps:
        lines.append(f"{step.name:24} {step.status:8} {step.elapsed_s:6.1f} s  {step.detail[:80]}")
    left = sum(step.status in UNFINISHED for step in report.steps)
    more = f"; {left} steps are left: --again gpu_check.json" if left else ""
    lines.append(f"\n{report.status}; every number is in gpu_check.json{more}")
    return "\n".join(lines)


def rows_of(results: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """Return the rows of all steps whose names begin with `kind`."""
    return [
        row for name, rows in results.items() if f"{name} ".startswith(f"{kind} ") for row in rows
    ]


def _line_of_benchmark(row: dict[str, Any]) -> str:
    wanted = "" if row["target"] is None else f"  wanted {row['target']:g}"
    reached = "" if row["target"] is None or row["ratio"] >= row["target"] else "  MISSED"
    return (
        f"{row['name']:48} {row['rate'] / 1e9:7.0f} GB/s  {row['ratio']:6.2f} x "
        f"{row['against']}{wanted}{reached}"
    )


def _line_of_probe(row: dict[str, Any]) -> str:
    rate = f"{row['rate'] / 1e9:7.1f} GB/s" if "rate" in row else " " * 12
    return f"{row['name']:48} {rate}  {row['status']} {row['detail'][:80]}".rstrip()


def _lines_of_checks(name: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return how many of a step's checks passed, those that did not, and the times."""
    counts = Counter(row["status"] for row in rows)
    lines = [f"{name}: " + ", ".join(f"{count} {told}" for told, count in counts.items())]
    lines += [
        f"  {row['status']}: {row['name']}: {row['detail'][:100]}"
        for row in rows
        if row["status"] != "passed"
    ][:MOST_SHOWN]
    lines += [
        f"  {row['name']:46} {row['time_s'] * 1e6:10.1f} us" for row in rows if "time_s" in row
    ]
    return lines


def lines_of_direct(bench: dict[str, Any]) -> list[str]:
    """Return the fraction of a copy's speed that the largest all_reduce of two ranks reaches."""
    reduced = [row for row in bench.get("results", ()) if row["collective"] == "all_reduce"]
    lines = []
    for row in reduced:
        if row["size"] < max(each["size"] for each in reduced):
            continue
        for copy in bench["limit"]:
            is_its = (copy["collective"], copy["size"]) == ("all_reduce", row["size"])
            if is_its and row["out_of_place"] and copy["out_of_place"]:
                of_copy = row["out_of_place"]["alg_bw"] / copy["out_of_place"]["bus_bw"]
                found = MOVED_BY_TWO * of_copy
                lines.append(
                    f"{row['library']} all_reduce of {row['size']} bytes, 2 ranks through direct: "
                    f"{found:.2f} of what its copies and reductions allow  wanted {DIRECT_TARGET:g}"
                    f"{'' if found >= DIRECT_TARGET else '  MISSED'}"
                )
    return lines
