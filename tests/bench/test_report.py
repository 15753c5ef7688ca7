from __future__ import annotations

import numpy as np

from gpucoll.bench import report
from gpucoll.bench.results import Measurement, Results, Row

ENVIRONMENT = {
    "command": "gpucoll-bench --compare mpich=/somewhere/bin/python,gloo --json /tmp/it.json -b 4",
    "array": "numpy",
    "cpu": "A CPU",
    "ranks": 2,
    "usable_cpus": 2,
    "pinned_cpus": [0, 1],
    "kernel": "Linux",
    "python": "3.12",
    "libraries": {"gpucoll": {"library": "gpucoll 1"}, "mpich": {"library": "MPICH 5"}},
    "date": "2030-01-02T03:04:05+00:00",
}

TABLES = """\
| call | side | library | median ratio | sizes | interval wholly above 1.0 |
| --- | --- | --- | ---: | ---: | --- |
| all_reduce float32 sum | out of place | gpucoll | 0.50 | 1 | none |
| all_reduce float32 sum | out of place | gpucoll symmetric | 0.25 | 1 | none |

**all_reduce float32 sum, out of place**

| bytes | gpucoll | gpucoll symmetric | mpich | gpucoll / best | gpucoll symmetric / best | limit / gpucoll | limit / gpucoll symmetric |
| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| 1 Ki | 4.00 | 2.00 | 8.00 | 0.50 [0.50, 0.50] mpich | 0.25 [0.25, 0.25] mpich | 0.25 | 0.50 |
"""  # noqa: E501


def write(tmp_path):
    def row(library, placement, time_us):
        side = Measurement(np.full((2, 3), time_us), 5, 0)
        where = (library, placement, "all_reduce", 2, 1024, 256, "float32", "sum", -1)
        return Row(*where, side, None)

    rows = [row("gpucoll", "private", 4.0), row("gpucoll", "symmetric", 2.0)]
    rows.append(row("mpich", "private", 8.0))
    path = tmp_path / "result.json"
    Results(ENVIRONMENT, rows, [row("limit", "private", 1.0)]).write(path)
    return path


def test_markdown(tmp_path, capsys):
    assert report.main([str(write(tmp_path))]) == 0
    text = capsys.readouterr().out
    assert text.endswith(TABLES)
    assert "`gpucoll-bench --compare mpich=PYTHON,gloo --json FILE -b 4`" in text
    assert "gpucoll 1, MPICH 5; 2030-01-02" in text


def test_a_list_beside_as_many_calls(tmp_path, capsys):
    side = {name: Measurement(np.full((2, 3), time_us), 5, 0) for name, time_us in
            (("gpucoll", 8.0), ("gpucoll-list", 1.0))}  # fmt: skip
    where = ("private", "all_reduce", 2, 4096, 1024, "float32", "sum", -1)
    rows = [Row(name, *where, one, None, list_length=500) for name, one in side.items()]
    path = tmp_path / "result.json"
    Results(ENVIRONMENT, rows).write(path)
    assert report.main([str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-5:] == [
        "**all_reduce float32 sum, list of 500, out of place**",
        "",
        "| bytes | gpucoll | gpucoll-list | gpucoll-list / gpucoll |",
        "| ---: | ---: | ---: | ---: |",
        "| 4 Ki | 8.00 | 1.00 | 0.12 [0.12, 0.12] gpucoll |",
    ]


def test_parts_tensors_and_figures(tmp_path, capsys):
    def entry(library, placement, time_us):
        cpu = np.full((2, 3), time_us / 2)
        side = Measurement(np.full((2, 3), time_us), 5, 0, "", cpu)
        where = (library, placement, "overlap", 2, 1024, 256, "float32", "sum", -1)
        return Row(*where, None, side)

    rows = [
        entry("gpucoll", "private", 4.0), entry("gpucoll", "blocking", 1.0),
        entry("gpucoll", "work", 2.0), entry("gpucoll", "torch", 5.0),
        entry("mpich", "private", 8.0), entry("mpich", "work", 2.0),
    ]  # fmt: skip
    where = ("private", "startup", 2, 0, 0, "none", "none", -1)
    side = Measurement(np.full((1, 3), 2e6), 1, 0)
    rows += [
        Row("gpucoll", *where, side, None, figures={"peak_bytes": 3 << 20, "cpu_s": 0.5}),
        Row("mpich", *where, side, None, figures={"cpu_s": 0.25}),
    ]
    path = tmp_path / "result.json"
    Results(ENVIRONMENT, rows).write(path)
    assert report.main([str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (header,) = [line for line in lines if "gpucoll torch - gpucoll (CPU)" in line]
    assert header.split(" | ")[-5:] == [
        "gpucoll / best", "gpucoll torch / best", "gpucoll / longer part", "mpich / longer part",
        "gpucoll torch - gpucoll (CPU) |",
    ]  # fmt: skip
    assert lines[lines.index(header) + 2].split(" | ")[-5:] == [
        "0.50 [0.50, 0.50] mpich", "0.62 [0.62, 0.62] mpich",
        "2.00 [2.00, 2.00] gpucoll work", "4.00 [4.00, 4.00] mpich work", "+1.00 (+0.50) |",
    ]  # fmt: skip
    assert lines[-6:] == [
        "**startup**",
        "",
        "| library | CPU a rank, s | peak memory a rank, MiB |",
        "| --- | ---: | ---: |",
        "| gpucoll | 0.50 | 3.0 |",
        "| mpich | 0.25 |  |",
    ]


def test_what_cannot_be_read_is_an_error(tmp_path, capsys):
    assert report.main([str(tmp_path / "missing.json")]) == 2
    assert "missing.json" in capsys.readouterr().err
