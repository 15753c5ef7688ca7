"""The order in which files run (`tests.run_order`)."""

from __future__ import annotations

from tests.run_order import order


def test_long_files_come_first_and_mpis_apart():
    quick = [f"tests/test_{n}.py" for n in range(20)]
    recorded = {name: n + 1.0 for n, name in enumerate(quick)}
    mpis = ["tests/backends/mpi/test_a.py", "tests/backends/mpi/test_b.py"]
    soak, unknown = "tests/models/test_models.py", "tests/test_new.py"
    found = order([unknown, *mpis, *quick, soak], recorded)
    assert [name for name in found if name not in mpis] == [soak, *quick[::-1], unknown]
    assert [found.index(name) for name in mpis] == [0, 12]
