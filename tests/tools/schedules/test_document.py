"""What docs/algorithms.md shows is what there is."""

from __future__ import annotations

import re
from pathlib import Path

from schedules.cli import main
from schedules.drawing import draw

from gpucoll.algorithms.table import ALGORITHMS, named
from gpucoll.collectives import Collective

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_every_algorithm_has_its_row_with_its_order():
    rows, collective = set(), ""
    for line in (DOCS / "algorithms.md").read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and (name := re.match("`(.+)`", cells[1])):
            collective = cells[0] or collective
            rows.add((collective, name[1], cells[5]))

    assert rows == {
        (one.collective.spelled, one.name, one.order.name.lower() if one.reduces else "")
        for one in ALGORITHMS
    }


def test_the_picture_is_what_is_drawn():
    drawn = draw(named(Collective.ALL_REDUCE, "ring"), 4)

    assert (DOCS / "algorithms_ring.svg").read_text("utf-8") == drawn


def test_the_example_is_what_is_printed(capsys):
    example = (DOCS / "algorithms.md").read_text("utf-8").split("```")[3]
    assert main(["all_reduce", "--hosts", "4"]) == 0
    printed = capsys.readouterr().out

    for part in example.split("...\n"):
        assert part.strip("\n") in printed
