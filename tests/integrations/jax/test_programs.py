"""Collectives of JAX inside jit: the programs in ``programs/``, on one to four ranks."""

from __future__ import annotations

import re

import pytest
from tests.integrations.jax.conftest import PROGRAMS


def checks_of(program):
    program = program.replace("_by_tokens", "")
    return re.findall(r"^def (check_\w+)", (PROGRAMS / program).read_text("utf-8"), re.M)


@pytest.mark.parametrize(
    ("program", "n_ranks"),
    [
        *(("calls.py", 2), ("gradients.py", 2), ("order.py", 3), ("errors.py", 2)),
        *(pytest.param("calls.py", n_ranks, marks=pytest.mark.soak) for n_ranks in (1, 3, 4)),
        *(pytest.param("gradients.py", n_ranks, marks=pytest.mark.soak) for n_ranks in (1, 3)),
        pytest.param("order_by_tokens.py", 2, marks=pytest.mark.soak),
        *(pytest.param("order.py", n_ranks, marks=pytest.mark.soak) for n_ranks in (1, 2, 4)),
    ],
)
def test_a_program(run_ranks, program, n_ranks):
    printed = run_ranks(n_ranks, PROGRAMS / program)
    for name in checks_of(program):
        assert printed.count(f"{name} passed") == n_ranks, printed


def test_the_end_of_a_program(run_ranks):
    printed = run_ranks(2, PROGRAMS / "ending.py")
    assert printed.count("the program is done") == 2
    assert printed.count("the child ended with 0") == 2
