"""Shapes and counts, without processes: for every collective against NumPy's own arithmetic."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from tests import oracle
from tests.collective_cases import COUNTED, COUNTS, GATHERING, SCATTERING, SPREAD, Case

from gpucoll.calls.shapes import parse_counts, result_of
from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentError, ArgumentTypeError

OTHERS = ("all_reduce", "reduce", "broadcast", "scan", "exclusive_scan")


def collective(name):
    return Collective[name.upper()]


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4)])
def test_the_result_has_the_input_s_shape(name, shape):
    result = result_of(collective(name), shape, 1, 3)

    assert (result.shape, result.in_place_rows) == (shape, 0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("name", COUNTED)
def test_equal_blocks(name, world_size):
    for rows, rest in itertools.product((0, 1, 5), ((), (3,), (2, 4), (0,))):
        length = rows * (world_size if name in SPREAD else 1)
        x = np.empty((length, *rest), np.int8)
        for rank in range(world_size):
            result = result_of(collective(name), x.shape, rank, world_size)
            assert result.shape == shape_of(name, [x] * world_size, rank)
            assert result.row_count == int(np.prod(rest))
            assert result.in_place_rows == place_of(name, [rows] * world_size, rank)


def shape_of(name, inputs, rank):
    if name in GATHERING:
        return oracle.all_gather(inputs)[rank].shape
    if name in SCATTERING:
        return oracle.scatter(inputs)[rank].shape
    return oracle.all_to_all(inputs)[rank].shape


def place_of(name, rows, rank):
    """Return how many rows the input begins after the output, in place."""
    before = sum(rows[:rank])
    return before if name in GATHERING else -before if name in SCATTERING else 0


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("counts", COUNTS)
def test_counts(name, counts, world_size):
    case = Case("int8", 5, collective=name, counts=counts, row=2, seed=3)
    if name == "gather":
        case = replace(case, collective="all_gather")  # of which every rank gets a result
    for rank in range(world_size):
        shape = case.input_of(rank, world_size).shape
        sent = tuple(case.rows(world_size, rank))
        received = None
        if name == "all_to_all":
            received = tuple(case.rows(world_size, sender)[rank] for sender in range(world_size))
        result = result_of(collective(name), shape, rank, world_size, sent, received)
        expected = case.expected(world_size)[rank]
        assert expected is not None
        assert result.shape == expected.shape
        assert result.in_place_rows == place_of(name, sent, rank)


def test_0d_inputs_are_a_row_each():
    for name in GATHERING:
        result = result_of(collective(name), (), 2, 5)
        assert (result.shape, result.in_place_rows, result.row_count) == ((5,), 2, 1)


@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.parametrize("shape", [(), (4,), (5, 3), (1, 3)])
def test_what_does_not_divide(name, shape):
    with pytest.raises(ArgumentError, match="must divide into 3 equal blocks; got shape"):
        result_of(collective(name), shape, 0, 3)


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("shape", [(), (4,), (9,), (4, 3)])
def test_counts_that_do_not_fit(name, shape):
    given = ((2, 2, 4), (1, 1, 1)) if name == "all_to_all" else ((2, 2, 4),)

    with pytest.raises(ArgumentError, match=f"{name}.* x (is 0-d|has [49] rows)"):
        result_of(collective(name), shape, 1, 3, *given)


@pytest.mark.parametrize("counts", [(1, 0, 2), [1, 0, 2], np.array([1, 0, 2]), range(3)])
def test_counts_become_a_tuple_of_ints(counts):
    parsed = parse_counts(counts, 3)

    assert parsed == tuple(counts)
    assert {type(count) for count in parsed} == {int}


@pytest.mark.parametrize(
    ("counts", "error", "text"),
    [
        ("auto", ArgumentTypeError, "one number of rows per rank"),
        (3, ArgumentTypeError, "one number of rows per rank"),
        ({1, 2, 3}, ArgumentTypeError, "one number of rows per rank"),
        ([1, 2.0, 3], ArgumentTypeError, "whole numbers of rows; got 2.0"),
        (np.ones(3), ArgumentTypeError, "whole numbers of rows"),
        ([1, True, 3], ArgumentTypeError, "whole numbers of rows; got True"),
        ([1, 2], ArgumentError, "one entry per rank, 3; got 2"),
        (np.ones((3, 1), int), ArgumentTypeError, "whole numbers of rows"),
        ([1, -1, 3], ArgumentError, r"not be negative; got \[1, -1, 3\]"),
    ],
)
def test_what_no_counts_are(counts, error, text):
    with pytest.raises(error, match=f"send_counts must .*{text}"):
        parse_counts(counts, 3, "send_counts")
