"""Schedules in rounds, and drawn."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from schedules.contents import EMPTY, Contents
from schedules.drawing import draw
from schedules.initial import initial_blocks
from schedules.rounds import rounds_of
from schedules.simulation import run
from tests.algorithms.test_schedules import each_algorithm

from gpucoll.algorithms.steps import WHOLE, Step
from gpucoll.algorithms.table import named
from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentError

SVG = "{http://www.w3.org/2000/svg}"
SIZES = (1, 2, 3, 5, 8, 11)


def elements(document, name):
    return ElementTree.fromstring(document).iter(f"{SVG}{name}")


@each_algorithm
def test_rounds_end_as_the_simulation_does(algorithm):
    for size in SIZES:
        contents, root = Contents(), size // 2
        schedules = algorithm.schedules(size, root)
        before = initial_blocks(algorithm, size, contents, root)

        rounds = rounds_of(schedules, before, contents)

        held = rounds[-1].held if rounds else before
        assert held == run(schedules, before, contents)
        assert sum(len(one.steps) for one in rounds) == sum(map(len, schedules))


def test_a_tree_has_as_many_rounds_as_levels():
    contents = Contents()
    algorithm = named(Collective.REDUCE, "binomial_tree")
    before = initial_blocks(algorithm, 8, contents)

    rounds = rounds_of(algorithm.schedules(8), before, contents)

    assert [len(one.steps) for one in rounds] == [8, 4, 2]


def test_what_never_ends_has_no_rounds():
    schedules = [[Step(receive_from=1, receive=WHOLE)], [Step(receive_from=0, receive=WHOLE)]]
    with pytest.raises(ArgumentError, match="do not fall into rounds"):
        rounds_of(schedules, [[EMPTY], [EMPTY]], Contents())


@pytest.mark.soak(quick=24)
@each_algorithm
def test_it_is_well_formed_and_all_lies_inside(algorithm):
    for size in SIZES:
        root = ElementTree.fromstring(draw(algorithm, size, size // 2))
        width, height = float(root.get("width", 0)), float(root.get("height", 0))
        for line in root.iter(f"{SVG}line"):
            assert all(0 <= float(line.attrib[x]) <= width for x in ("x1", "x2"))
            assert all(0 <= float(line.attrib[y]) <= height for y in ("y1", "y2"))
        for text in root.iter(f"{SVG}text"):
            assert 0 <= float(text.attrib["x"]) <= width


def test_a_ring_of_three():
    document = draw(named(Collective.ALL_REDUCE, "ring"), 3)

    words = [element.text for element in elements(document, "text")]
    assert words[0] == "all_reduce: ring, 3 ranks"
    assert [word for word in words if word and word.startswith("rank")] == [
        "rank 0", "rank 1", "rank 2",
    ]  # fmt: skip
    arrows = [line for line in elements(document, "line") if line.get("marker-end")]
    assert len(arrows) == 4 * 3 + 3, "a message of each rank in each round, and the legend"
    dashed = [line for line in arrows if line.get("stroke-dasharray")]
    assert len(dashed) == 3 * 3 + 1, "all but those of the first round are forwarded"


def test_shades_tell_how_many_ranks_are_in_a_block():
    document = draw(named(Collective.ALL_REDUCE, "chain"), 4)

    shades = [r.get("fill") for r in elements(document, "rect") if r.get("stroke")]
    first, last = shades[:4], shades[-4:]
    assert len(set(first)) == 1
    assert len(set(last)) == 1
    assert len(set(shades)) == 4


def test_what_is_too_large_is_refused():
    with pytest.raises(ArgumentError, match="a drawing of 17 hosts: at most 16"):
        draw(named(Collective.ALL_REDUCE, "ring"), 17)
