"""tools/loop_code.py: which loops have other instructions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import loop_code

CODE = """\
\t.globl\tfirst
.LJTI{n}_0:
\t.long\t0
\t.type\tfirst,@function
first:
\t.cfi_startproc
\tcallq\t_Zhelper{n}   # a comment
\tjne\t.LBB{n}_1
.LBB{n}_1:
\tretq
.Lfunc_end0:
\t.type\t_Zhelper{n},@function
_Zhelper{n}:
\tmovq\t${value}, %rax
\tmovq\t.LCPI{n}_0(%rip), %xmm0
.Lfunc_end1:
.LCPI{n}_0:
\t.quad\t{constant}
"""


@pytest.fixture
def written(tmp_path):
    def write(name, **given):
        path = tmp_path / name
        path.write_text(CODE.format(**({"n": 1, "value": 5, "constant": 7} | given)))
        return path

    return write


def test_names_and_numbers_of_labels_do_not_count(written):
    assert list(loop_code.compare(written("a"), written("b", n=9))) == []


@pytest.mark.parametrize("change", ["value", "constant"])
def test_what_a_function_uses_counts(written, change):
    found = list(loop_code.compare(written("a"), written("b", **{change: 6})))
    assert len(found) == 1
    assert found[0].startswith("first: ")


def test_a_function_that_is_gone(written):
    path = written("b")
    path.write_text(path.read_text().replace("first", "other"))
    assert list(loop_code.compare(written("a"), path)) == [
        "first: only before",
        "other: only after",
    ]
