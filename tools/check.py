"""Check the whole checkout with one command: format, lint, types, layers, tests.

::

    python tools/check.py                     # everything
    python tools/check.py --fix               # let ruff repair format and lint first
    python tools/check.py --only lint types   # some stages
    python tools/check.py --only tests -- -k barrier -x   # what follows -- goes to pytest

Every stage runs, even after another one has failed. The table at the end has the result and the
time of each stage, and the exit code is 1 if any stage failed. Types, layers and tests see the
package through the link tree (tools/link_tree.py), without an installation; ``pip install
'.[dev]'`` installs the tools.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import link_tree

ROOT = link_tree.ROOT
STAGE_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Request:
    """The parsed command line."""

    fix: bool
    pytest_arguments: list[str]


@dataclass(frozen=True)
class Outcome:
    """The result of a stage."""

    stage: str
    passed: bool
    elapsed_s: float


def format_commands(request: Request) -> list[list[str]]:
    """Return the commands that check, or repair, the format."""
    return [["-m", "ruff", "format", *([] if request.fix else ["--check"]), "."]]


def lint_commands(request: Request) -> list[list[str]]:
    """Return the lint commands; ruff also bans imports of mapped folders by their bare names."""
    return [["-m", "ruff", "check", *(["--fix"] if request.fix else []), "."]]


def types_commands(request: Request) -> list[list[str]]:
    """Return the commands that check types: strict in the package, less so in tests."""
    return [["-m", "mypy"]]


def layers_commands(request: Request) -> list[list[str]]:
    """Return the commands that check the order of layers and what ``import gpucoll`` may load."""
    linter = "from importlinter.cli import lint_imports_command as main; main()"
    return [["-c", linter], ["-m", "pytest", "-q", "tests/test_layers.py"]]


def tests_commands(request: Request) -> list[list[str]]:
    """Return the commands that run the tests."""
    return [["-m", "pytest", *request.pytest_arguments]]


STAGES: dict[str, Callable[[Request], list[list[str]]]] = {
    "format": format_commands,
    "lint": lint_commands,
    "types": types_commands,
    "layers": layers_commands,
    "tests": tests_commands,
}


def succeeds(arguments: list[str]) -> bool:
    """Run Python with `arguments` in the root of the checkout, with the link tree on its path."""
    environment = dict(os.environ)
    inherited = environment.get("PYTHONPATH")
    places = [str(link_tree.DEFAULT_PLACE), *([inherited] if inherited else [])]
    environment["PYTHONPATH"] = os.pathsep.join(places)
    command = [sys.executable, *arguments]
    print(f"$ python {shlex.join(arguments)}", flush=True)
    try:
        process = subprocess.run(command, cwd=ROOT, env=environment, timeout=STAGE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        print(f"not done after {STAGE_TIMEOUT_S:.0f} s, given up", flush=True)
        return False
    return process.returncode == 0


def run_stage(stage: str, request: Request) -> Outcome:
    """Run all commands of a stage."""
    print(f"\n=== {stage} ===", flush=True)
    begin_s = time.monotonic()
    results = [succeeds(command) for command in STAGES[stage](request)]
    return Outcome(stage, all(results), time.monotonic() - begin_s)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Format, lint, types, layers, tests: one command.")
    parser.add_argument("--only", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--fix", action="store_true", help="repair format and lint where possible")
    parser.add_argument("pytest_arguments", nargs="*", metavar="-- PYTEST-ARGUMENT")
    options = parser.parse_args(arguments)
    request = Request(options.fix, options.pytest_arguments)

    link_tree.make()
    outcomes = [run_stage(stage, request) for stage in STAGES if stage in options.only]

    print("\n=== summary ===")
    for outcome in outcomes:
        verdict = "passed" if outcome.passed else "FAILED"
        print(f"{outcome.stage:8} {verdict} {outcome.elapsed_s:8.1f} s")
    print(f"{'total':8} {'':6} {sum(outcome.elapsed_s for outcome in outcomes):8.1f} s")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
