"""The one table of collectives: its facts, and that few other files know a collective by name."""

import io
import pickle
import tokenize
from pathlib import Path

import pytest

from gpucoll.backends.cpu.world.backend import large_calls
from gpucoll.backends.gpu import rank_order
from gpucoll.backends.nccl import collectives as nccl_collectives
from gpucoll.backends.protocol import row_of
from gpucoll.calls.shapes import result_of
from gpucoll.collectives import NO_ROOT, Collective, Data
from gpucoll.errors import BackendUnavailableError
from tests import collective_cases as cases

ROOT = Path(__file__).resolve().parent.parent
OF_ARRAYS = [each for each in Collective if each.data == Data.ARRAYS and not each.is_composed]
ARRAYS = [each for each in OF_ARRAYS if not each.is_list]
IN_ORDER = (
    "BARRIER ALL_REDUCE BROADCAST BROADCAST_OBJECT ALL_GATHER_OBJECT GATHER_OBJECT SCATTER_OBJECT "
    "ALL_REDUCE_OBJECT SPLIT DUPLICATE REDUCE ALL_GATHER GATHER REDUCE_SCATTER SCATTER ALL_TO_ALL "
    "SCAN EXCLUSIVE_SCAN COUNTS SEND RECV ALL_REDUCE_LIST COMPRESSED_ALL_REDUCE CONNECT UNFIT "
    "GROW"
)
NUMBERS = {name: number for number, name in enumerate(IN_ORDER.split(), 1)}
MOST_FILES = 14
"""How many files know a collective by name, beside schedules, of which it may have several."""
SCHEDULES = ("bruck", "chain", "direct", "doubling", "halving", "pairwise", "ring", "trees")


def test_the_numbers_are_part_of_signatures():
    assert {each.name: int(each) for each in Collective} == NUMBERS
    assert all(pickle.loads(pickle.dumps(each)) is each for each in Collective)


def test_every_collective_of_arrays_has_common_cases():
    assert {each.spelled for each in ARRAYS} == {*cases.COLLECTIVES}


@pytest.mark.parametrize("collective", ARRAYS, ids=lambda each: each.spelled)
def test_facts(collective):
    name = collective.spelled
    assert collective.has_root == (name in cases.ROOTED)
    assert collective.spreads == (name in cases.SPREAD)
    assert collective.gathers == (name in (*cases.GATHERING, "all_to_all"))
    assert collective.reduces == (name in cases.REDUCTIONS)
    assert collective.is_scan == (name in cases.SCANS)
    assert collective.has_blocks == (name in cases.COUNTED)
    assert collective.is_exchange == (name == "all_to_all")
    assert collective.knows_one_block == (name == "scatter")
    assert collective.takes_lists == (name in ("all_reduce", "reduce", "broadcast"))


@pytest.mark.parametrize("collective", ARRAYS, ids=lambda each: each.spelled)
def test_who_gives_and_gets(collective):
    root = 1 if collective.has_root else NO_ROOT
    gives = [collective.gives(rank, root) for rank in range(3)]
    gets = [collective.gets(rank, root) for rank in range(3)]
    assert gives == (
        [False, True, False] if collective.spelled in ("broadcast", "scatter") else [True] * 3
    )
    assert gets == (
        [False, True, False] if collective.spelled in ("reduce", "gather") else [True] * 3
    )


@pytest.mark.parametrize("collective", ARRAYS, ids=lambda each: each.spelled)
def test_rows_of_results(collective):
    multiply, divide = collective.rows_factor(3)
    assert result_of(collective, (12, 2), 1, 3).shape == (12 * multiply // divide, 2)


def test_operands_of_ranks():
    def of(collective):
        return [collective.n_operands(rank, 3) for rank in range(3)]

    assert of(Collective.ALL_REDUCE) == [3, 3, 3]
    assert of(Collective.SCAN) == [1, 2, 3]
    assert of(Collective.EXCLUSIVE_SCAN) == [0, 1, 2]


def test_bus_factors_are_those_of_nccl_tests():
    factors = {each.spelled: each.bus_factor(4) for each in ARRAYS}
    assert factors["all_reduce"] == 1.5
    assert {name for name, factor in factors.items() if factor == 0.75} == {*cases.COUNTED}
    assert {name for name, factor in factors.items() if factor == 1} == {
        *("reduce", "broadcast", "scan", "exclusive_scan")
    }


def test_lists_are_of_one():
    assert Collective.ALL_REDUCE.of_list is Collective.ALL_REDUCE_LIST
    assert Collective.ALL_REDUCE_LIST.of_one is Collective.ALL_REDUCE
    assert Collective.REDUCE.of_list is None
    assert Collective.REDUCE.of_one is Collective.REDUCE


def test_each_table_has_every_collective():
    assert {*large_calls()} == {*OF_ARRAYS}
    assert {*nccl_collectives.MAKERS} == {*OF_ARRAYS}
    assert {*rank_order.MAKERS} == {each for each in OF_ARRAYS if each.reduces}


def test_what_a_backend_lacks_is_said():
    with pytest.raises(BackendUnavailableError, match="scan is not available between hosts"):
        row_of({Collective.REDUCE: 1}, Collective.SCAN, "between hosts")


def files_that_name(name):
    """Return the files whose code names a collective: its member, or a function called like it."""
    spellings = {name, f"_{name}", f"_quick_{name}", f"_quick_{name}_blocks", f"plan_{name}"}
    found = []
    for folder in ("src", "backends", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            if "integrations" in path.parts or path.stem in SCHEDULES:
                continue
            text = path.read_text("utf-8")
            if name not in text.lower():
                continue  # most files: they need not be taken apart
            tokens = [*tokenize.generate_tokens(io.StringIO(text).readline)]
            words = {token.string for token in tokens if token.type == tokenize.NAME}
            if words & spellings or ({name.upper()} <= words and words & {"Collective", "_C"}):
                found.append(path.relative_to(ROOT).as_posix())
    return sorted(found)


@pytest.mark.parametrize("name", ["exclusive_scan", "reduce_scatter"])  # no other call uses these
def test_few_files_know_a_collective_by_name(name):
    found = files_that_name(name)
    assert len(found) <= MOST_FILES, found
