"""The table, with nccl-tests' columns; every line that is not a result begins with ``#``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpucoll.bench.arguments import Options
from gpucoll.bench.estimates import Ratio, ratio
from gpucoll.bench.figures import FIGURES
from gpucoll.bench.peers import PEERS
from gpucoll.bench.results import OWN, SIDES, Measurement, Results, Row
from gpucoll.bench.summary import few_rounds, summaries

__all__ = ["footer", "header", "lines_of_size", "wrapped"]

WIDTHS = "{:>12}  {:>12}  {:>10}  {:>6}  {:>6}"
BEFORE_SIDES = len(WIDTHS.format(*[""] * 5))
PERCENTILES = ("p50", "p99")
"""The columns of ``--percentiles``, after the time."""


def header(
    options: Options, ranks: int, environment: dict[str, object] | None = None
) -> Iterator[str]:
    """Yield the lines above a collective's results, for the first one with the environment."""
    warmup, reps = (
        "by time" if given is None else given for given in (options.warmup, options.reps)
    )
    yield (
        f"# {options.collective} nRanks {ranks} minBytes {options.sizes_bytes[0]} maxBytes "
        f"{options.sizes_bytes[-1]} step: {options.step} warmup iters: {warmup} "
        f"iters: {reps} rounds: {options.rounds} validation: {int(options.check)}"
    )
    if options.list_length > 1:
        yield (
            f"# {options.list_length} arrays of each size: gpucoll-list passes them in one call, "
            "the others in one call each"
        )
    if options.limit and options.on_gpus and options.traits.has_data:
        yield (
            "# copy: a copy of the same size within the device of rank 0, alone; its busbw counts "
            "the bytes read and written"
        )
    yield "#"
    if environment is not None:
        yield from machine(ranks, environment)
    width = len(side_columns([""] * 4, ["", ""] if options.percentiles else []))
    yield "#" + " " * (BEFORE_SIDES - 1) + f"{'out-of-place':^{width}}{'in-place':^{width}}"
    extra = PERCENTILES if options.percentiles else ()
    names = side_columns(("time", "algbw", "busbw", "#wrong"), extra)
    units = side_columns(("(us)", "(GB/s)", "(GB/s)", ""), ["(us)"] * len(extra))
    columns = WIDTHS.format("size", "count", "type", "redop", "root")
    yield "#" + columns[1:] + 2 * names + "  library"
    yield "#" + WIDTHS.format("(B)", "(elements)", "", "", "")[1:] + 2 * units


def side_columns(texts: Sequence[object], percentiles: Sequence[object]) -> str:
    """Return the columns of one side: time, bandwidths and wrong, and percentiles if there are."""
    time, *others = texts
    wide = "".join(f"  {text:>8}" for text in (time, *percentiles))
    return wide + "".join(f"  {text:>6}" for text in others)


def machine(ranks: int, environment: dict[str, object]) -> Iterator[str]:
    """Yield the lines about the machine, the libraries and the method."""
    cpus = environment["pinned_cpus"]
    where = "not pinned"
    if isinstance(cpus, list):
        where = f"pinned in rank order to CPUs {', '.join(map(str, cpus))}"
    yield f"# {environment['cpu']}, {environment['kernel']}, Python {environment['python']}"
    yield f"# {ranks} ranks on {environment['usable_cpus']} usable CPUs, {where}"
    libraries = environment["libraries"]
    assert isinstance(libraries, dict)
    for name, versions in libraries.items():
        rest = [f"{key} {value}" for key, value in versions.items() if key != "library"]
        if cpus and name in PEERS and not PEERS[name].pinned:
            rest.append("not pinned")
        yield f"# {name}: {', '.join([versions['library'], *rest])}"
    yield "#"
    if note := environment.get("test_device"):
        yield from wrapped(str(note))
        yield "#"
    yield from wrapped(str(environment["timing"]))
    yield "#"


def wrapped(text: str, width: int = 110) -> Iterator[str]:
    """Yield a text as comment lines."""
    line = "#"
    for word in text.split():
        if len(line) + 1 + len(word) > width:
            yield line
            line = "#"
        line = f"{line} {word}"
    yield line


def lines_of_size(rows: list[Row], limit: Row | None, percentiles: bool = False) -> Iterator[str]:
    """Yield the results of one size, each of gpucoll's followed by its ratios to the peers."""
    for row in rows:
        yield line_of(row, percentiles)
        yield from figure_lines(row)
    if limit is not None and limit.library == "copy":
        yield line_of(limit, percentiles)
    width = len(side_columns([""] * 4, [""] * len(PERCENTILES) if percentiles else []))
    for title, texts in comparisons(rows, limit):
        line = f"#{title:>{BEFORE_SIDES - 1}}"
        yield (line + "".join(f"  {text:<{width - 2}}" for text in texts)).rstrip()


def comparisons(rows: list[Row], limit: Row | None) -> Iterator[tuple[str, list[str]]]:
    """Yield what is compared, and the result of each side."""
    peers = [row for row in rows if row.library not in OWN and not row.is_part]
    for row in rows:
        parts = [part for part in rows if part.is_part and part.library == row.library]
        if parts and not row.is_part:
            yield f"{row.title} / longer part", ratios(row, parts, longest=True)
        if row.library in OWN and not row.is_part and (row.out_of_place or row.in_place):
            for peer in peers:
                yield f"{row.title} / {peer.title}", ratios(row, [peer])
            if len(peers) > 1:
                yield f"{row.title} / best", ratios(row, peers)
            if row.placement == "torch":
                yield "gpucoll torch / gpucoll", ratios(row, rows[:1])
                yield "gpucoll torch - gpucoll", differences(row, rows[0])
            if row.library == "gpucoll-list":
                yield "gpucoll-list / gpucoll", ratios(row, rows[:1])
            if limit is not None and limit.library == "copy":
                yield f"{row.title} busbw / copy", fractions(row, limit)
            elif limit is not None:
                yield f"limit / {row.title}", ratios(limit, [row])


def line_of(row: Row, percentiles: bool) -> str:
    """Return the line of a result."""
    start = WIDTHS.format(row.size_bytes, row.count, row.dtype, row.redop, row.root)
    sides = "".join(side_text(row, row.side(name), percentiles) for name in SIDES)
    return start + sides + f"  {row.title}" + (f" ({row.path})" if row.path else "")


def figure_lines(row: Row) -> Iterator[str]:
    """Yield a line for each figure that is not the time of a call."""
    for name, value in row.figures.items():
        figure = FIGURES[name]
        title = f"{row.title} {figure.title}"
        yield f"#{title:>{BEFORE_SIDES - 1}}  {figure.text(value):>10}"


def side_text(row: Row, side: Measurement | None, percentiles: bool) -> str:
    """Return the columns of one side; N/A if the library has no such call."""
    names = PERCENTILES if percentiles else ()
    if side is None:
        return side_columns(["N/A"] * 4, ["N/A"] * len(names))
    bandwidths = ["N/A" if one is None else f"{one:.2f}" for one in row.bandwidths(side)]
    wrong = "N/A" if side.wrong is None else side.wrong
    found = side.percentiles_us or {}
    extra = [time_text(found[name]) if found else "N/A" for name in names]
    return side_columns([time_text(side.time_us), *bandwidths, wrong], extra)


def time_text(time_us: float) -> str:
    """Format a time in microseconds with a suitable number of digits."""
    digits = 2 if time_us < 100 else 1 if time_us < 10_000 else 0
    return f"{time_us:.{digits}f}"


def differences(own: Row, other: Row) -> list[str]:
    """Return each side's extra cost over another call in microseconds: time, and CPU time."""
    texts = []
    for name in SIDES:
        mine, theirs = own.side(name), other.side(name)
        found = "N/A"
        if mine is not None and theirs is not None:
            found = f"{mine.time_us - theirs.time_us:+.2f} us"
            if mine.cpu_us is not None and theirs.cpu_us is not None:
                found += f", {mine.cpu_us - theirs.cpu_us:+.2f} us of CPU"
        texts.append(found)
    return texts


def ratios(own: Row, others: list[Row], longest: bool = False) -> list[str]:
    """Return each side's ratio of times with its 95 % interval.

    The other time is that of the best of `others`, or with `longest` the longest.
    """
    texts = []
    for name in SIDES:
        mine = own.side(name)
        theirs = [(row, side) for row in others if (side := row.side(name)) is not None]
        if mine is None or not theirs:
            found = "N/A"
        else:
            found = str(ratio(mine.samples, [side.samples for _, side in theirs], longest))
            if len(others) > 1:
                choose = max if longest else min
                chosen = choose(theirs, key=lambda one: one[1].time_us)[0]
                found += f" {chosen.placement if longest else chosen.library}"
        texts.append(found)
    return texts


def fractions(own: Row, copy: Row) -> list[str]:
    """Return each side's ratio of bus bandwidth to that of a copy, with its interval."""
    found = [fraction_of_copy(own, own.side(name), copy, copy.side(name)) for name in SIDES]
    return ["N/A" if one is None else str(one) for one in found]


def fraction_of_copy(
    own: Row, mine: Measurement | None, copy: Row, copied: Measurement | None
) -> Ratio | None:
    """Return the fraction of a copy's bandwidth that a call reaches; None if it moves nothing."""
    if mine is None or copied is None:
        return None
    bus, most = own.bandwidths(mine)[1], copy.bandwidths(copied)[1]
    if not bus or not most:
        return None
    # this ratio differs from the result only by a factor
    times = ratio(copied.samples, [mine.samples])
    return Ratio(*(bus / most / times.value * value for value in times))


def footer(results: Results) -> Iterator[str]:
    """Yield the lines below the results; the first two are nccl-tests'."""
    wrong = results.wrong
    yield f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}"
    # averages over several collectives are meaningless
    if len({row.collective for row in results.rows}) == 1:
        for title, average in results.bus_bandwidths().items():
            whose = "" if title == "gpucoll" else f" ({title})"
            yield f"# Avg bus bandwidth    : {average:.6g}{whose}"
    entries = results.as_json()["results"]
    found = list(summaries(entries))
    for summary in found:
        yield from wrapped(str(summary))
    if found and (caution := few_rounds(entries)):
        yield from wrapped(caution)
    for failure in results.failures:
        yield f"# Given up: {failure.splitlines()[0]}"
