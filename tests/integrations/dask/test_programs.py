"""The programs for Dask in the documents and the examples."""

from __future__ import annotations

import pytest
from tests.integrations.engine.programs import EXAMPLES, document_program, output_of

pytest.importorskip("distributed", reason="distributed is not installed")


def test_the_program_of_the_documents(tmp_path, rank_server):
    program = tmp_path / "program.py"
    program.write_text(document_program("Dask"))

    assert output_of(program).endswith("[3. 3. 3.]")


def test_principal_components(rank_server):
    said = output_of(EXAMPLES / "dask_principal_components.py")

    assert said.endswith("the same on every rank: True")
