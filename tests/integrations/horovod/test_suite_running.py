"""The runner of Horovod's tests, on a small file of tests."""

from __future__ import annotations

from tests.integrations.horovod.suite.running import run

TESTS = """
import os
import unittest

RANK = int(os.environ["HOROVOD_RANK"])

class Tests(unittest.TestCase):
    def test_passes(self):
        assert os.environ["HOROVOD_SIZE"] == "2"

    def test_fails_on_rank_1(self):
        assert RANK == 0, "odd"

    def test_is_skipped(self):
        self.skipTest("no GPUs")

    def test_is_skipped_on_rank_1(self):
        if RANK:
            self.skipTest("rank 1")

    def test_of_parts(self):
        for part in range(3):
            with self.subTest(part):
                assert part != 1

    def test_z_ends_the_process(self):
        if RANK:
            os._exit(3)
"""


def test_outcomes_of_ranks_are_told_together(tmp_path):
    (tmp_path / "parallel").mkdir()
    file = tmp_path / "parallel" / "test_small.py"
    file.write_text(TESTS, "utf-8")

    outcomes = run(file, 2, timeout_s=50)

    assert outcomes.went == {
        "Tests::test_fails_on_rank_1": "failed",
        "Tests::test_is_skipped": "skipped",
        "Tests::test_is_skipped_on_rank_1": "passed",
        "Tests::test_of_parts": "failed",
        "Tests::test_passes": "passed",
        "Tests::test_z_ends_the_process": "failed",
    }, outcomes.output
    assert "odd" in outcomes.reasons["Tests::test_fails_on_rank_1"]
    assert outcomes.reasons["Tests::test_z_ends_the_process"].startswith("rank 1: the rank ended")

    left_out = {
        "Tests::test_fails_on_rank_1": "rank 1 is odd",
        "Tests::test_of_parts": "part 1 fails",
        "Tests::test_passes": "it does not",
        "Tests::test_gone": "it is not there",
    }
    told = outcomes.differences(left_out)
    assert [line.split()[0] for line in told] == [
        "Tests::test_z_ends_the_process",
        "Tests::test_passes",
        "Tests::test_gone",
    ]
