"""The report as plain text in 80 columns; advice and verdict come last."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from gpucoll.doctor.facts import Report, Topology
from gpucoll.doctor.findings import ABSENT, FAIL, NETWORK, NOTE, OK, Line, gpu_names, sections

__all__ = ["render"]

WIDTH = 80
MARK_WIDTH = max(map(len, (OK, ABSENT, NOTE, FAIL)))
LABEL_WIDTH = 15
INDENT = " " * (2 + MARK_WIDTH + 1 + LABEL_WIDTH + 1)
_BOLD = "1"
_COLOURS = {OK: "32", NOTE: "33", FAIL: "31;1"}
_LEGEND = (
    "PIX: one PCIe switch. PXB: several. PHB: the CPU's host bridge. NODE: several host bridges of "
    "a NUMA node. SYS: between NUMA nodes. NVn: n NVLinks. XGMI: AMD's links. *: this GPU's NIC."
)
_NO_NVLINKS = "NVLinks are not shown, because NVML did not report them."


def render(report: Report, in_colour: bool = False) -> str:
    """Return the report as text.

    Parameters
    ----------
    report : Report
        The report.
    in_colour : bool
        Whether to colour marks and titles, for a terminal.
    """
    system = report["system"]
    kernel = f"{system['kernel']} {system['machine']}"
    lines = [f"gpucoll {report['gpucoll']}, Python {system['python']}, {kernel}"]
    for title, findings in sections(report):
        body = [line for finding in findings for line in _laid_out(finding, in_colour)]
        if title == NETWORK:
            body += _matrix(report)
        if body:
            lines += ["", _coloured(title, _BOLD, in_colour), *body]
    return "\n".join([*lines, "", *_advice(report, in_colour), _verdict(report, in_colour), ""])


def _coloured(text: str, code: str, in_colour: bool) -> str:
    return f"\033[{code}m{text}\033[0m" if in_colour and code else text


def _laid_out(finding: Line, in_colour: bool) -> Iterator[str]:
    """Yield a finding's lines: mark, label and text, and the rest of the text below."""
    mark = _coloured(finding.mark, _COLOURS.get(finding.mark, ""), in_colour)
    mark += " " * (MARK_WIDTH - len(finding.mark))
    first, *others = _wrapped(finding.text, INDENT, INDENT)
    if len(finding.label) > LABEL_WIDTH:  # the label gets a line of its own
        yield f"  {mark} {finding.label}"
        yield first
    else:
        yield f"  {mark} {finding.label:<{LABEL_WIDTH}} {first.lstrip()}".rstrip()
    yield from others


def _wrapped(text: str, first: str, others: str) -> list[str]:
    """Break a text at spaces; a path is never broken, so that it can be copied."""
    lines = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [""]


def _matrix(report: Report) -> list[str]:
    topology = report["topology"]
    if topology is None or not topology["gpus"]:
        return []
    legend = _LEGEND
    if not topology["knows_nvlinks"] and any(x["vendor"] == "nvidia" for x in topology["gpus"]):
        legend = f"{legend} {_NO_NVLINKS}"
    return [
        "",
        *(f"  {line}".rstrip() for line in _table(topology, gpu_names(report), WIDTH - 2)),
        "",
        *_wrapped(legend, "  ", "  "),
    ]


def _table(topology: Topology, names: Mapping[int, str], width: int) -> list[str]:
    """Return the lines of GPU x GPU and GPU x NIC, in the style of ``nvidia-smi topo -m``.

    Columns that do not fit go into further blocks.

    Parameters
    ----------
    topology : Topology
        Which devices are close to each other.
    names : mapping
        Place in the topology's list -> name, for the GPUs to show, in order; at least one.
    width : int
        The maximum number of columns of a line.
    """
    rdma = [number for number, nic in enumerate(topology["nics"]) if nic["is_rdma"]]
    shown = rdma or list(range(len(topology["nics"])))
    nics = [topology["nics"][number]["name"] for number in shown]
    rows = [[*names.values(), *nics, "NUMA: CPUs"]]
    for number in names:
        gpu, words = topology["gpus"][number], topology["gpu_to_gpu"][number]
        to_gpus = ["X" if words[other] == "SELF" else words[other] for other in names]
        to_nics = [
            topology["gpu_to_nic"][number][nic]
            + ("*" if topology["nics"][nic]["name"] == gpu["nearest_nic"] else "")
            for nic in shown
        ]
        node = "-" if gpu["numa_node"] < 0 else str(gpu["numa_node"])
        rows.append([*to_gpus, *to_nics, f"{node}: {gpu['cpus'] or '-'}"])
    return _blocks(["", *names.values()], rows, width)


def _blocks(names: list[str], rows: list[list[str]], width: int) -> list[str]:
    """Arrange columns in as many blocks as are needed, each with the row names in front."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    first = max(map(len, names))
    lines: list[str] = []
    column = 0
    while column < len(widths):
        taken, used = column, first
        while taken < len(widths) and (taken == column or used + 1 + widths[taken] <= width):
            used += 1 + widths[taken]
            taken += 1
        if lines:
            lines.append("")
        for name, row in zip(names, rows, strict=True):
            cells = (row[x].ljust(widths[x]) for x in range(column, taken))
            lines.append(" ".join([name.ljust(first), *cells]).rstrip())
        column = taken
    return lines


def _advice(report: Report, in_colour: bool) -> Iterator[str]:
    if report["advice"]:
        yield _coloured("What to do", _BOLD, in_colour)
        for number, advice in enumerate(report["advice"], 1):
            yield from _wrapped(f"{advice['what']}: {advice['why']}", f"  {number}. ", " " * 5)
            if advice["command"]:
                yield f"     $ {advice['command']}"
        yield ""


def _verdict(report: Report, in_colour: bool) -> str:
    works = report["cpu_path_works"]
    text = "The CPU path works." if works else "The CPU path does not work."
    if works and report["self_test"] is None:
        text = "Nothing that the CPU path needs is missing; it was not tried."
    return _coloured(text, _COLOURS[OK if works else FAIL], in_colour)
