"""The table of other libraries' names: gpucoll's code runs, and the documents have its rows."""

from __future__ import annotations

import traceback
from collections import Counter

import coming_from
import draw_which
import numpy as np
import pytest
from tests.coming_from import run_here

from gpucoll.api.coming_from import LIBRARIES, rows


@pytest.mark.ranks(2)
def test_the_code_of_every_row_runs(comm):
    failed = []
    for row in rows():
        if row.here and "gcj." not in row.here:  # those need JAX
            try:
                run_here(row, comm, lambda items: np.array(items, np.float32))
            except Exception:
                failed.append(f"{row.here}\n{traceback.format_exc(limit=-2)}")

    assert not failed, "\n".join(failed)


def test_the_documents_have_the_rows():
    for path, text in coming_from.written().items():
        assert path.read_text("utf-8") == text, "run python tools/coming_from.py"


def test_the_picture_of_backends_is_what_the_tool_draws():
    path = coming_from.ROOT / "docs/images/which_backend.svg"
    assert path.read_text("utf-8") == draw_which.picture(), (
        "run python tools/draw_pictures.py which"
    )


def test_every_library_has_its_tables():
    counts = Counter(row.library for row in rows())

    assert [*counts] == [*LIBRARIES]
    assert min(counts[library] for library in ("mpi4py", "torch.distributed")) >= 25
    assert min(counts.values()) >= 12
