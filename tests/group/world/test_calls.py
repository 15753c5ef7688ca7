"""What the calls' own tests do on one host, done by ranks of several: lists, objects, ints, ..."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api import test_communicator as communicators
from tests.api import test_custom_ops as custom_ops
from tests.api import test_groups as groups
from tests.calls import test_block_lists as block_lists
from tests.calls import test_exact_integers as integers
from tests.calls import test_fused_lists as fused_lists
from tests.calls import test_objects as objects
from tests.calls import test_works_and_plans as works
from tests.collective_cases import SMALL_TUNING
from tests.compression import test_compression as compression

BODIES: dict[str, tuple[Any, list[Any], list[str]]] = {
    f"lists of {' '.join(dtypes)}": (
        fused_lists.test_lists,
        [
            (name, counts, dtypes, placement)
            for name in fused_lists.CALLS
            for counts in fused_lists.COUNTS.values()
        ],
        ["abb"],
    )
    for dtypes, placement in ((["f8", "i2", "f4"], "shared"), (["f4"], "private"))
}
BODIES |= {
    "lists, started and grouped": (
        fused_lists.test_asynchronous_and_grouped,
        [(name,) for name in fused_lists.CALLS],
        ["ab"],
    ),
    "empty lists": (
        fused_lists.test_an_empty_list_or_tuple_comes_back_empty,
        [(name,) for name in fused_lists.CALLS],
        ["ab"],
    ),
    "columns": (fused_lists.test_columns_are_packed_and_filled, [()], ["ab"]),
    "lists of blocks in place": (block_lists.test_in_place, [()], ["ab", "aab", "abc"]),
    "a list beside an array": (
        block_lists.test_a_rank_may_have_a_list_and_another_an_array,
        [()],
        ["ab", "aba"],
    ),
    "lists of blocks in other ways": (
        block_lists.test_asynchronous_planned_grouped_and_with_deadlines,
        [()],
        ["ab"],
    ),
    "custom operations in order": (custom_ops.test_ranks_are_combined_in_order, [()], ["aabb"]),
    "custom operations on half types": (custom_ops.test_half_types_are_rounded_once, [()], ["ab"]),
    "ints beyond int64": (
        integers.test_an_int_beyond_int64_is_refused,
        [(name,) for name in integers.CALLS],
        ["ab"],
    ),
    "bools": (integers.test_bools_stay_bools_and_custom_ops_wrap, [()], ["ab"]),
    "objects are kept": (
        objects.test_who_gave_an_object_keeps_it_and_others_get_their_own,
        [()],
        ["ab"],
    ),
    "objects that cannot be pickled": (
        objects.test_every_rank_is_told_of_what_cannot_be_pickled,
        [(name, size) for name in objects.CALLS for size in (1, 5000)],
        ["aab", "abb"],
    ),
    "objects behind asynchronous calls": (
        objects.test_objects_behind_asynchronous_calls,
        [()],
        ["ab"],
    ),
    "plans": (works.test_a_plan_is_called_again_and_again, [()], ["aba"]),
    "works": (works.test_works, [()], ["ab"]),
    "blocking calls take their turn": (
        works.test_blocking_calls_wait_for_their_turn,
        [()],
        ["ab", "aab"],
    ),
    "what cannot be in a group": (groups.test_what_cannot_be_inside, [()], ["ab"]),
    "plans in groups": (groups.test_a_plan_inside_runs_at_the_end_or_is_refused, [()], ["ab"]),
    "outputs used in a group": (
        groups.test_a_call_may_use_the_output_of_an_earlier_one,
        [()],
        ["ab"],
    ),
    "compressed lists": (
        compression.test_lists_are_fused_and_share_no_scale,
        [(name,) for name in compression.BLOCKS],
        ["ab"],
    ),
    "compressed half types": (
        compression.test_half_types_are_widened_and_rounded_once_more,
        [(name, dtype) for name in compression.BLOCKS for dtype in ("float16", "bfloat16")],
        ["aab", "abc"],
    ),
}
"""name -> (body, its arguments, where the ranks are)"""
BODIES |= {
    f"lists of blocks, {body.__name__}": (
        body,
        [(kind, place) for kind in block_lists.COUNTS for place in ("private", "shared")],
        ["ab", "aab", "aba"],
    )
    for body in (
        block_lists.test_all_gather_and_gather,
        block_lists.test_reduce_scatter_and_scatter,
        block_lists.test_all_to_all,
    )
}


def run_all(comm, body, arguments):
    for given in arguments:
        body(comm, *given)
    return comm.all_reduce(1)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("name", BODIES)
def test_bodies(hosts, name):
    body, arguments, shapes = BODIES[name]
    for placed in shapes:
        assert hosts.call(placed, run_all, body, arguments) == [len(placed)] * len(placed)


@pytest.mark.soak
@pytest.mark.parametrize("is_symmetric", [False, True])
def test_custom_operations(hosts, is_symmetric):
    for placed in ("aab", "abb"):
        hosts.call(placed, custom_ops.all_reductions, is_symmetric, environment=SMALL_TUNING)


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize("op", integers.OPS)
@pytest.mark.parametrize("name", integers.VALUES)
def test_ints_are_exact(hosts, op, name):
    for placed in ("ab", "aab"):
        on_hosts = hosts.call(placed, integers.reduce_ints, op, name)
        assert on_hosts == hosts.call("a" * len(placed), integers.reduce_ints, op, name)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", ["ab", "aab", "abbb"])
def test_objects_of_all_kinds(hosts, placed):
    found = hosts.call(placed, objects.exchange_all)

    assert found == hosts.call("a" * len(placed), objects.exchange_all)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("name", compression.COMPRESSIONS)
def test_compressed_bits_are_those_of_one_host(hosts, name):
    for placed in ("ab", "aabb"):
        got = hosts.call(placed, compression.reduce_all_counts, name)
        alone = hosts.call("a" * len(placed), compression.reduce_all_counts, name)
        assert repr(got) == repr(alone)


def test_communicators_in_two_threads(hosts):
    found = hosts.call("aab", communicators.use_in_two_threads)

    assert found == [{"first": 600.0, "second": 600.0}] * 3


def test_communicators_close_in_any_order(hosts):
    assert hosts.call("ab", communicators.close_parent_first) == [(2.0, 10_000.0)] * 2
