from __future__ import annotations

from dataclasses import replace

import numpy as np

from gpucoll.bench import table
from gpucoll.bench.arguments import parse
from gpucoll.bench.results import Measurement, Results, Row

ENVIRONMENT = {
    "cpu": "A CPU",
    "kernel": "Linux 6.1 x86_64",
    "python": "3.12.1",
    "usable_cpus": 2,
    "pinned_cpus": [0, 1],
    "timing": "A sample is a loop.",
    "libraries": {
        "gpucoll": {"library": "gpucoll 1.2", "numba": "0.60"},
        "gloo": {"library": "Gloo in torch 2.13"},
    },
}

# ruff: noqa: E501 (the table is wider than the code)

HEADER = """\
# all_reduce nRanks 2 minBytes 4 maxBytes 1048576 step: 4(factor) warmup iters: 3 iters: by time rounds: 9 validation: 1
#
# A CPU, Linux 6.1 x86_64, Python 3.12.1
# 2 ranks on 2 usable CPUs, pinned in rank order to CPUs 0, 1
# gpucoll: gpucoll 1.2, numba 0.60
# gloo: Gloo in torch 2.13, not pinned
#
# A sample is a loop.
#
#                                                                out-of-place                        in-place
#       size         count        type   redop    root      time   algbw   busbw  #wrong      time   algbw   busbw  #wrong  library
#        (B)    (elements)                                  (us)  (GB/s)  (GB/s)              (us)  (GB/s)  (GB/s)
"""

LINES = """\
     1048576        262144     float32     sum      -1     50.00   20.97   20.97       0     25.00   41.94   41.94       3  gpucoll
     1048576        262144     float32     sum      -1     100.0   10.49   10.49       0     250.0    4.19    4.19       0  mpich
     1048576        262144     float32     sum      -1       N/A     N/A     N/A     N/A     12500    0.08    0.08     N/A  gloo
#                                      gpucoll / mpich  0.50 [0.50, 0.50]                 0.10 [0.10, 0.10]
#                                       gpucoll / gloo  N/A                               0.00 [0.00, 0.00]
#                                       gpucoll / best  0.50 [0.50, 0.50] mpich           0.10 [0.10, 0.10] mpich
#                                      limit / gpucoll  0.80 [0.80, 0.80]                 0.80 [0.80, 0.80]
"""

FOOTER = """\
# Out of bounds values : 3 FAILED
# Avg bus bandwidth    : 31.4573
# Avg bus bandwidth    : 7.34003 (mpich)
# Avg bus bandwidth    : 0.0838861 (gloo)
# all_reduce float32 sum, out of place: gpucoll / best 0.50 (median of 1 sizes); above 1.0: none
# all_reduce float32 sum, in place: gpucoll / best 0.10 (median of 1 sizes); above 1.0: none
# Given up: gloo: no answer
"""


def side(time_us, wrong=0):
    return Measurement(np.full((2, 9), time_us), 10, wrong)


def row(library, out_of_place, in_place, placement="private"):
    where = (library, placement, "all_reduce", 2, 1 << 20, 1 << 18, "float32", "sum", -1)
    return Row(*where, out_of_place, in_place)


def rows():
    return [
        row("gpucoll", side(50.0), side(25.0, wrong=3)),
        row("mpich", side(100.0), side(250.0)),
        row("gloo", None, side(12500.0, wrong=None)),
    ]


def test_parts_of_a_pattern_are_compared_with_nothing_but_the_whole():
    given = [
        row("gpucoll", None, side(3.0)), row("gpucoll", None, side(1.0), "blocking"),
        row("gpucoll", None, side(2.0), "work"), row("mpich", None, side(6.0)),
        row("mpich", None, side(0.5), "blocking"), row("mpich", None, side(4.0), "work"),
    ]  # fmt: skip
    lines = [line.split() for line in table.lines_of_size(given, None) if line.startswith("#")]
    assert [" ".join(line[1:]) for line in lines] == [
        "gpucoll / longer part N/A 1.50 [1.50, 1.50] work",
        "gpucoll / mpich N/A 0.50 [0.50, 0.50]",
        "mpich / longer part N/A 1.50 [1.50, 1.50] work",
    ]


def test_what_tensors_cost_above_arrays():
    def measured(time_us, cpu_us):
        return Measurement(np.full((2, 9), time_us), 10, 0, "", np.full((2, 9), cpu_us))

    given = [row("gpucoll", measured(1.0, 0.9), None)]
    given.append(row("gpucoll", measured(1.5, 1.3), None, "torch"))
    lines = [" ".join(line.split()) for line in table.lines_of_size(given, None)]
    assert lines[-2:] == [
        "# gpucoll torch / gpucoll 1.50 [1.50, 1.50] N/A",
        "# gpucoll torch - gpucoll +0.50 us, +0.40 us of CPU N/A",
    ]


def test_figures_have_lines_of_their_own_and_no_ratios():
    figures = {"cpu_s": 0.25, "communicator_shared_bytes": 3 << 20}
    where = ("private", "memory", 2, 0, 0, "none", "none", -1, None, None)
    given = [Row(name, *where, figures=figures) for name in ("gpucoll", "mpich")]
    lines = list(table.lines_of_size(given, None))
    assert len(lines) == 6
    assert " ".join(lines[1].split()) == "# gpucoll CPU a rank, s 0.25"
    assert " ".join(lines[5].split()) == "# mpich communicator: shared by all, MiB 3.00"


def test_header():
    lines = table.header(parse(["-w", "3", "-e", "1M"]), 2, ENVIRONMENT)
    assert "".join(f"{line.rstrip()}\n" for line in lines) == HEADER


def test_the_header_of_a_further_collective_does_not_repeat_the_environment():
    lines = [line.rstrip() for line in table.header(parse(["-w", "3", "-e", "1M"]), 2)]
    first = HEADER.splitlines()
    assert lines == [*first[:2], *first[-3:]]


def test_lines_of_a_size():
    lines = table.lines_of_size(rows(), row("limit", side(40.0), side(20.0)))
    assert "".join(f"{line}\n" for line in lines) == LINES


WIDE = """\
#                                                                          out-of-place                                            in-place
#       size         count        type   redop    root      time       p50       p99   algbw   busbw  #wrong      time       p50       p99   algbw   busbw  #wrong  library
#        (B)    (elements)                                  (us)      (us)      (us)  (GB/s)  (GB/s)              (us)      (us)      (us)  (GB/s)  (GB/s)
     1048576        262144     float32     sum      -1     50.00     100.0     198.0   20.97   20.97       0     25.00       N/A       N/A   41.94   41.94       0  gpucoll
     1048576        262144     float32     sum      -1     100.0       N/A       N/A   10.49   10.49       0       N/A       N/A       N/A     N/A     N/A     N/A  mpich
#                                      gpucoll / mpich  0.50 [0.50, 0.50]                                     N/A
"""


def test_columns_of_percentiles():
    single_us = np.arange(200) + 1.0
    given = [
        row("gpucoll", replace(side(50.0), single_us=single_us), side(25.0)),
        row("mpich", side(100.0), None),
    ]
    lines = list(table.header(parse(["--percentiles"]), 2))[-3:]
    lines += table.lines_of_size(given, None, percentiles=True)
    assert "".join(f"{line.rstrip()}\n" for line in lines) == WIDE


def test_footer():
    results = Results({}, rows(), failures=["gloo: no answer\nmore of it"])
    assert "".join(f"{line}\n" for line in table.footer(results)) == FOOTER


def test_a_program_that_reads_nccl_tests_reads_this():
    fields = next(table.lines_of_size(rows(), None)).split()
    assert fields[:5] == ["1048576", "262144", "float32", "sum", "-1"]
    assert [float(field) for field in fields[5:13]] == [50, 20.97, 20.97, 0, 25, 41.94, 41.94, 3]
    for lines in (table.header(parse([]), 2, ENVIRONMENT), table.footer(Results({}, rows()))):
        assert all(line.startswith("#") for line in lines)


def test_symmetric_rows_and_plans_have_ratios_of_their_own():
    several = [
        row("gpucoll", side(50.0), None),
        row("gpucoll", side(10.0), None, "symmetric"),
        row("gpucoll-plan", side(40.0), None),
        row("mpich", side(100.0), None),
    ]
    text = "\n".join(table.lines_of_size(several, None))
    assert "gpucoll symmetric / mpich  0.10" in text
    assert "gpucoll-plan / mpich  0.40" in text
    assert "best" not in text  # there is one peer only


def test_times_keep_three_digits_at_least():
    assert [table.time_text(time) for time in (0.123, 99.99, 100.0, 9999.9, 10000.0)] == [
        "0.12", "99.99", "100.0", "9999.9", "10000",
    ]  # fmt: skip
