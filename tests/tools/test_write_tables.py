"""The tables of the pages on speed are what the kept results say."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pytest

from gpucoll.bench.results import Measurement, Results, Row

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import measure_torch_training  # noqa: E402
import write_tables  # noqa: E402

sys.path.remove(str(ROOT / "tools"))


@pytest.mark.parametrize("page", write_tables.PAGES)
def test_pages_are_what_the_results_say(page: str):
    """If not, `python tools/write_tables.py` writes them again."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert len(write_tables.TABLE.findall(text)) == text.count("<!-- ") / 2 > 0
    assert write_tables.written(text) == text


def test_the_first_sentence_holds():
    """Of `docs/performance.md`: no peer is faster up to 4 KiB, or in all_reduce."""
    path = write_tables.newest("all-2-ranks")
    assert path is not None
    lost = [cell for cell in write_tables.cells_of(path) if cell.ratio.low > 1]
    assert min(cell.size for cell in lost) == 16 << 10
    assert "all_reduce" not in {cell.call.split()[0] for cell in lost}


def row(library: str, size: int, time_us: float) -> Row:
    side = Measurement(np.full((2, 3), time_us), 5, 0)
    return Row(library, "private", "scan", 2, size, size // 4, "float32", "sum", -1, side, None)


def write(folder: Path, times: dict[int, tuple[float, float]]) -> Path:
    """Write a result: gpucoll's time and MPICH's for each size."""
    rows = [row(name, size, time_us) for size, both in times.items()
            for name, time_us in zip(("gpucoll", "mpich"), both, strict=True)]  # fmt: skip
    path = folder / "2030-01-02-some.json"
    named = ("cpu", "usable_cpus", "array", "ranks", "command", "date", "kernel", "python")
    Results({**dict.fromkeys(named, "some"), "libraries": {}}, rows).write(path)
    return path


def test_where_a_peer_is_faster(tmp_path):
    times = {1 << power: (1.0, 2.0) for power in (2, 3, 7)} | {16: (3.0, 2.0), 32: (4.0, 2.0)}
    path = write(tmp_path, {**times, 64: (2.0, 2.0), 1 << 20: (5.0, 2.0)})
    assert list(write_tables.slower([path]))[2:] == [
        "| scan | 16 B to 32 B, 1 MiB | 2.50 at 1 MiB (MPICH) |"
    ]
    assert list(write_tables.outcome([path]))[2:] == [
        "| all sizes | 3 | 1 | 3 | 1.00 |",
        "| up to 4 KiB | 3 | 1 | 2 | 0.75 |",
        "| 1 MiB to 64 MiB | 0 | 0 | 1 | 2.50 |",
    ]


def test_the_newest_result_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(write_tables, "RESULTS", tmp_path)
    write_tables.newest.cache_clear()
    write(tmp_path, {4: (3.0, 2.0)})
    (tmp_path / "2029-12-31-some.json").write_text("older")
    page = write_tables.written("a\n<!-- slower: some more -->\nold\n<!-- end of slower -->\nz\n")
    write_tables.newest.cache_clear()
    assert page.startswith("a\n<!-- slower: some more -->\n\n| call |")
    assert page.endswith("at 4 B (MPICH) |\n\n<!-- end of slower -->\nz\n")
    assert "old" not in page


def test_tables_that_there_are_not():
    with pytest.raises(ValueError, match="no table 'fastest'; there are headline, "):
        write_tables.written("<!-- fastest: all-2-ranks -->\n<!-- end of fastest -->\n")


def test_steps_of_training_are_a_result(tmp_path, monkeypatch):
    """What measure_torch_training.py keeps has the form of gpucoll-bench's."""
    times = {"gloo": [0.2] * 3, "gpucoll": [0.1] * 3, "no communication": [0.05] * 3}
    given = argparse.Namespace(ranks=2, backends=["gloo", "gpucoll"], environment={})
    path = tmp_path / "2030-01-02-ddp_step-2-ranks.json"
    content = measure_torch_training.as_json(times, given, 25_178_112)
    monkeypatch.setattr(write_tables, "content_of", lambda _: content)
    assert list(write_tables.headline([path]))[2:] == [
        "| training step | 100 ms | Gloo 200 ms | 0.50 [0.50, 0.50] |"
    ]
