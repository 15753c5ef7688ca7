"""docs/api.md names everything public, as it is, and its examples run."""

from __future__ import annotations

import inspect
import operator
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpucoll
from gpucoll import config, errors, training
from gpucoll.training import gossip
from gpucoll.types import BUILT_IN, DTYPES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
TEXT = PAGE.read_text(encoding="utf-8")
WORDS = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", TEXT))))
SIGNATURES = re.findall(r"^\| `([\w.]+\([^`]*\))", TEXT, re.MULTILINE)

EXAMPLE = re.compile(r"^```python( alone)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = [
    (TEXT.count("\n", 0, match.start(2)), bool(match[1]), match[2])
    for match in EXAMPLE.finditer(TEXT)
]
CODE = "\n".join(code for _, _, code in EXAMPLES)

METHODS = sorted(name for name in dir(gpucoll.Communicator) if not name.startswith("_"))
ABOVE_THE_TABLE = {"self", "out", "async_op", "timeout_s", "stream"}
"""Parameters that the page describes once for many calls."""


def examples(alone: bool) -> Any:
    chosen = [(line, code) for line, is_alone, code in EXAMPLES if is_alone == alone]
    return pytest.mark.parametrize(
        ("line", "code"), chosen, ids=[f"line-{line + 1}" for line, _ in chosen]
    )


@pytest.mark.ranks(2)
@examples(alone=False)
def test_example_runs_on_two_ranks(comm, line, code):
    at_its_line = "\n" * line + code
    names = {"comm": comm, "np": np, "gpucoll": gpucoll}

    exec(compile(at_its_line, PAGE.name, "exec"), names)  # noqa: S102  (a document of this project)


@examples(alone=True)
def test_example_runs_as_a_program(line, code):
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)

    assert process.returncode == 0, process.stderr.decode()


def test_public_names_are_on_the_page():
    variables = config.known_variables()

    missing = {
        *gpucoll.__all__,
        *errors.__all__,
        *training.__all__,
        *gossip.__all__,
        *METHODS,
        *variables,
    } - WORDS

    assert not missing


def test_ops_and_dtypes_are_on_the_page():
    families = {re.sub(r"^u?int\d+$", "int64", name) for name in DTYPES}

    assert not set(BUILT_IN) - WORDS
    assert not [name for name in families if name not in TEXT]


@pytest.mark.parametrize("name", METHODS)
def test_methods_have_an_example(name):
    assert re.search(rf"\.{name}\b", CODE)


@pytest.mark.parametrize("written", SIGNATURES)
def test_signature_is_that_of_the_code(written):
    name = written.partition("(")[0]
    owner = gpucoll.Communicator if name in METHODS else gpucoll
    names: dict[str, Any] = {name: getattr(gpucoll, name) for name in gpucoll.__all__}

    exec(f"def f{written[len(name) :]}: ...", names)  # noqa: S102  (a document of this project)

    assert parameters(names["f"]) == parameters(operator.attrgetter(name)(owner))


def parameters(function: Any) -> list[tuple[str, Any]]:
    return [
        (parameter.name, parameter.default)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in ABOVE_THE_TABLE
        and parameter.kind is not parameter.VAR_KEYWORD  # what is refused, with the remedy
    ]
