"""Collectives of JAX inside jit: the programs in ``programs/``.

More ranks, by hand: ``gpucoll-run -n 4 tests/integrations/jax/programs/order.py [CHECK ...]``.
"""

from __future__ import annotations

import re

import pytest
from tests.integrations.jax.conftest import PROGRAMS


@pytest.mark.parametrize(
    ("program", "n_ranks"), [("calls", 2), ("gradients", 2), ("order", 3), ("errors", 2)]
)
def test_a_program(run_ranks, program, n_ranks):
    file = PROGRAMS / f"{program}.py"
    printed = run_ranks(n_ranks, file)
    for name in re.findall(r"^def (check_\w+)", file.read_text("utf-8"), re.M):
        assert printed.count(f"{name} passed") == n_ranks, printed


def test_order_by_tokens(run_ranks):
    """As in a version of JAX that begins no program with a token of its own."""
    checks = ["check_independent_calls", "check_unused_results", "check_control_flow"]
    printed = run_ranks(2, PROGRAMS / "order_by_tokens.py", *checks)
    assert printed.count("passed") == 2 * len(checks)


def test_the_end_of_a_program(run_ranks):
    printed = run_ranks(2, PROGRAMS / "ending.py")
    assert printed.count("the program is done") == 2
    assert printed.count("the child ended with 0") == 2
