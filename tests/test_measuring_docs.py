"""docs/measuring.md: its command lines are understood, and compare prints what it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gpucoll.bench import arguments, cli, compare, report

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "measuring.md").read_text("utf-8")
LINES = re.findall(r"^ *(?:\w+/bin/)?gpucoll-bench (.*)$", TEXT, re.MULTILINE)
SHOWN = re.findall(r"^```text\n\$ gpucoll-bench (.*)\n((?:.+\n)+)```$", TEXT, re.MULTILINE)


def test_command_lines_are_understood():
    assert len(LINES) == 9
    for line in LINES:
        name, *rest = shlex.split(line)
        if name == "compare":
            compare.make_parser().parse_args(rest)
        elif name == "report":
            report.make_parser().parse_args(rest)
        else:
            arguments.parse([name, *rest])


@pytest.mark.parametrize(("line", "output"), SHOWN, ids=["times", "ratios"])
def test_the_output_is_what_the_command_prints(line, output, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert cli.main(shlex.split(line)) == 0
    assert capsys.readouterr().out == output
