"""The record of durations: the quick tier keeps to its limits, and a run renews its own entries."""

from __future__ import annotations

import json

from tests.durations import RECORD, ROOT, DurationRecorder
from tests.tiers import place_of

MOST_OF_A_TEST_S = 2.2
"""A deadline of 2 s, and what is done beside it."""
MOST_OF_A_FILE_S = 15.0
MOST_OF_ALL_S = 475.0
"""One after the other, without pytest-xdist; four workers on two CPUs take half as long."""


def test_the_quick_tier_keeps_to_its_limits():
    record = json.loads(RECORD.read_text("utf-8"))
    hint = "`pytest --write-durations FILE` renews its entry; the mark soak takes a test out"
    assert record["workers"] == 1, "only what runs alone is measured: write without -n"
    tests = {test: s for test, s in record["long_tests"].items() if s > MOST_OF_A_TEST_S}
    assert not tests, hint
    assert not {name: s for name, s in record["files"].items() if s > MOST_OF_A_FILE_S}, hint
    assert record["sum_s"] <= MOST_OF_ALL_S, hint
    files = {
        path.relative_to(ROOT).as_posix(): path for path in (ROOT / "tests").rglob("test_*.py")
    }
    for name in files.keys() - record["files"].keys():
        text = files[name].read_text("utf-8")
        may_lack = place_of(name) != "quick" or "mark.soak" in text or "importorskip" in text
        assert may_lack, f"{name} is not recorded: {hint}"


def test_a_run_of_some_files_renews_their_entries(tmp_path):
    record = tmp_path / "durations.json"
    kept, renewed = "tests/test_names.py", "tests/test_layers.py"
    for files, body_s in (([kept, renewed], 3.0), ([renewed], 0.25)):
        recorder = DurationRecorder(record)
        for file in files:
            recorder.add(f"{file}::test_it", False, 0.5)
            recorder.add(f"{file}::test_it", True, body_s)
        recorder.write(n_workers=4)

    content = json.loads(record.read_text("utf-8"))
    assert content["files"] == {renewed: 0.75, kept: 3.5}
    assert content["long_tests"] == {f"{kept}::test_it": 3.0}
    assert content["sum_s"] == 4.2
