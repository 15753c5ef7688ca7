"""``python -m gpucoll.bench.compression``: what it prints and writes, its arithmetic."""

from __future__ import annotations

import json

import pytest

from gpucoll.bench import compression
from gpucoll.types import COMPRESSIONS


def test_a_small_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compression, "REDUCED_BYTES", (4096,))
    place = tmp_path / "figures.json"
    options = [
        "--size",
        "64K",
        "--arrays",
        "3",
        "--rounds",
        "2",
        "--ranks",
        "1",
        "--json",
        str(place),
    ]

    assert compression.main(options) == 0

    found = json.loads(place.read_text())
    assert set(found) == {"environment", "kernels", "pack", "all_reduce", "break_even"}
    for rates in (found["kernels"], found["pack"]):
        assert rates[0]["name"] == "memcpy"
        assert rates[0]["of_memcpy"] == 1
        assert all(rate["gb_per_s"] > 0 for rate in rates)
    assert [row["size"] for row in found["all_reduce"]] == [4096]
    lines = capsys.readouterr().out.splitlines()
    names = {rate["name"] for rate in found["kernels"] + found["pack"]}
    assert names <= {line[23:] for line in lines}
    assert all(set(row) == {"ranks", *COMPRESSIONS} for row in found["break_even"])


def test_break_even_by_hand():
    """All kernels at 10 GB/s: 6 bytes an element there, a half of that and more for the share..."""
    rates = {
        "float32 to float16": 10.0,
        "float16 to float32": 10.0,
        "dequantise and add 2 float16": 10.0,
    }
    # 2 ranks: 6 there, 3 for the sum's way, 2 + 2 adding up, 6 back: 19 bytes; 2 saved.
    assert compression.break_even("float16", 2, rates) == pytest.approx(2 / 1.9)


def test_bad_arguments(capsys):
    with pytest.raises(SystemExit):
        compression.parse(["--size", "many"])
    assert "is not a size" in capsys.readouterr().err
