"""The plugin beside others: each is skipped where it is not installed."""

from __future__ import annotations

import pytest

pytest_plugins = "pytester"


@pytest.mark.soak
def test_xdist(inner):
    pytest.importorskip("xdist")
    result = inner(
        *("-p", "xdist"),
        "-n2",
        test_it="""
            import os
            import pytest

            @pytest.mark.ranks(2, 3)
            @pytest.mark.parametrize("turn", range(3))
            def test_it(comm, turn, tmp_path, worker_id):
                assert worker_id == os.environ["PYTEST_XDIST_WORKER"]
                (tmp_path / str(comm.rank)).touch()
                comm.barrier()
                assert len(list(tmp_path.iterdir())) == comm.world_size

            @pytest.mark.ranks(2)
            def test_fails(comm):
                local = 5
                assert comm.rank + local == 7
            """,
    )

    result.assert_outcomes(passed=6, failed=1)
    result.stdout.fnmatch_lines(
        ["ranks 0-1 of 2:", "local * = 5", "on rank 1: *assert (1 + 5) == 7*"]
    )


@pytest.mark.soak
def test_coverage_of_what_ranks_execute(inner):
    pytest.importorskip("pytest_cov")
    result = inner(
        *("-p", "pytest_cov"),
        "--cov=code_of_ranks",
        "--cov-report=term-missing",
        code_of_ranks="""
            def work(comm):
                if comm.rank == 0:
                    x = 1
                elif comm.rank == 1:
                    x = 2
                else:
                    x = 3  # on no rank of the test
                return comm.all_reduce(x)
            """,
        test_it="""
            import pytest
            import code_of_ranks

            @pytest.mark.ranks(2)
            def test_it(comm):
                assert code_of_ranks.work(comm) == 3
            """,
    )

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["code_of_ranks.py * 1 * 8"])


@pytest.mark.soak
def test_timeout_ends_a_rank_that_hangs(inner):
    pytest.importorskip("pytest_timeout")
    result = inner(
        *("-p", "pytest_timeout"),
        "--timeout=1",
        test_it="""
            import time
            import pytest

            @pytest.mark.ranks(2)
            def test_hangs(comm):
                if comm.rank == 1:
                    time.sleep(30)
                comm.barrier()

            @pytest.mark.ranks(2)
            def test_passes(comm): ...
            """,
    )

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*Timeout*1*"])
