"""The picture of the ring through exported memory, and the bytes that it shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from draw_gpu_ring import draw, table_lines, traffic

from gpucoll.backends.direct.peer_memory import HALF_BYTES

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_document_has_what_is_drawn_and_counted():
    assert (DOCS / "gpu_ring.svg").read_text("utf-8") == draw()
    assert set(table_lines()) <= set((DOCS / "gpu.md").read_text("utf-8").splitlines())


@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ["ring", "shares"])
def test_bytes_and_waits(name, size):
    one = traffic(name, size)

    each_gpu = 2 * (size - 1) * HALF_BYTES // size
    assert one.each_way("gpu", one.moves) == each_gpu
    assert sum(move.size_bytes for move in one.moves) == size * each_gpu
    across = each_gpu if name == "ring" else size * HALF_BYTES // 2
    assert one.each_way("switch", one.moves) == across
    assert one.waits == len(one.steps()) == (2 * (size - 1) if name == "ring" else 2)


@pytest.mark.parametrize("size", [4, 8])
def test_waits_of_large_arrays(size):
    """Shares wait twice for each half; a lap of the ring takes as many halves as there are GPUs."""
    large = size * HALF_BYTES

    assert traffic("shares", size, 3 * large).waits == 3 * 2 * size
    assert traffic("ring", size, 3 * large).waits == 3 * 2 * (size - 1)


def test_the_ring_goes_to_neighbours_only():
    assert {move[:2] for move in traffic("ring", 4).moves} == {(0, 1), (1, 2), (2, 3), (3, 0)}
