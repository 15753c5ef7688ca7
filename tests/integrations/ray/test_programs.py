"""The programs for Ray in the documents and the examples."""

from __future__ import annotations

from tests.integrations.engine.programs import EXAMPLES, document_program, output_of


def test_the_program_of_the_documents(cluster, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(document_program("Ray").replace("num_cpus=1", "num_cpus=0.1"))

    assert output_of(program, RAY_ADDRESS=cluster.address).endswith("[3. 3. 3.]")


def test_least_squares(cluster):
    said = output_of(EXAMPLES / "ray_least_squares.py", RAY_ADDRESS=cluster.address)

    assert "ranks in the end: 3 and 2" in said
    assert said.endswith("the weights are right: True")
