"""The command ``python tools/schedules``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from gpucoll.algorithms.choice import choose
from gpucoll.algorithms.cost import Cost, cost_of, largest
from gpucoll.algorithms.table import Algorithm, algorithms_for, named
from gpucoll.errors import ArgumentError
from schedules.arguments import Options, parse
from schedules.drawing import draw
from schedules.hierarchy import Prediction, block_sizes, predict_call
from schedules.printing import cost_line, cost_lines, counted, schedule_lines, size_text, time_text

ALL_RANKS_UP_TO: Final = 8
"""Up to this number all ranks are printed; beyond that, rank 0 (or the requested rank)."""
COMPARED_UP_TO: Final = 64
"""Up to this number of hosts the other algorithms are priced, too; beyond, that takes long."""
EXIT_USAGE: Final = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = parse(arguments)
    try:
        algorithm = asked_for(options)
        drawing = draw(algorithm, options.hosts, options.root) if options.svg else ""
        lines = report(options, algorithm)
        if options.svg:
            Path(options.svg).write_text(drawing, encoding="utf-8")
            lines.append(f"drawn: {options.svg}")
    except (ArgumentError, OSError) as error:
        print(f"python tools/schedules: {error}", file=sys.stderr)
        return EXIT_USAGE
    print("\n".join(lines))
    return 0


def asked_for(options: Options) -> Algorithm:
    """Return the algorithm that the user named, or the chosen one."""
    if options.algorithm is not None:
        return named(options.collective, options.algorithm)
    return choose(
        options.collective,
        options.size_bytes,
        options.hosts,
        commutative=options.commutative,
        ordered=options.ordered,
    )


def report(options: Options, algorithm: Algorithm) -> list[str]:
    """Return the lines to print."""
    sizes = block_sizes(algorithm, options.size_bytes, options.hosts)
    lines = [title(options, algorithm), buffer_line(sizes), ""]
    for rank in shown(options):
        steps = algorithm.steps(rank, options.hosts, options.root)
        cost = cost_of(steps, sizes)
        lines += schedule_lines(rank, options.hosts, steps)
        if steps:
            lines.append(cost_line(cost))
        lines.append("")
    priced = list(prices(options, algorithm))
    lines += ["the most of any rank, and the time of all:", *cost_lines(priced)]
    prediction = priced[0][2]
    if prediction is not None and options.ranks_per_host > 1:
        lines.append(
            f"{algorithm.name}: {time_text(prediction.before_s)} inside hosts, "
            f"{time_text(prediction.between_s)} between them, "
            f"{time_text(prediction.after_s)} inside again"
        )
    return lines


def title(options: Options, algorithm: Algorithm) -> str:
    """Return the first line: the call and its algorithm."""
    ranks = options.ranks_per_host
    each = f" of {ranks} ranks" if ranks > 1 else ""
    root = f", root {options.root}" if algorithm.is_rooted else ""
    size = f" of {size_text(options.size_bytes)}" if options.size_bytes else ""
    hosts = counted(options.hosts, "host")
    return f"{algorithm.collective.spelled}{size}, {hosts}{each}{root}: {algorithm.name}"


def buffer_line(sizes: Sequence[int]) -> str:
    """Return the line that describes the working buffer."""
    size = " to ".join(dict.fromkeys((size_text(min(sizes)), size_text(max(sizes)))))
    return f"working buffer: {counted(len(sizes), 'block')} of {size}"


def shown(options: Options) -> Iterable[int]:
    """Return the ranks whose steps are printed."""
    if options.rank is not None:
        return (options.rank,)
    return range(options.hosts if options.hosts <= ALL_RANKS_UP_TO else 1)


def prices(options: Options, algorithm: Algorithm) -> Iterable[tuple[str, Cost, Prediction | None]]:
    """Yield name, cost and time of the algorithm, and of the others for the collective."""
    rest = [one for one in algorithms_for(options.collective) if one.name != algorithm.name]
    for one in [algorithm, *(rest if options.hosts <= COMPARED_UP_TO else ())]:
        sizes = block_sizes(one, options.size_bytes, options.hosts)
        cost = largest(
            cost_of(one.steps(rank, options.hosts, options.root), sizes)
            for rank in range(options.hosts)
        )
        prediction = predict_call(
            one,
            options.size_bytes,
            options.hosts,
            options.ranks_per_host,
            options.network,
            options.inside,
            options.root,
        )
        yield one.name, cost, prediction
