"""The README's two commands can be found, and what is no single command is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FENCE = "```"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/readme_commands.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("name", "ends"), [("bench", "gpucoll-bench all_reduce"), ("tests", "pytest")]
)
def test_each_command_of_the_readme_makes_its_own_environment(name: str, ends: str):
    process = run(name)

    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("python3 -m venv ")
    assert ends in process.stdout.split("&&")[-1]


@pytest.mark.parametrize(
    "text",
    [
        "no marker\n",
        "<!-- command: tests -->\nno block\n",
        f"<!-- command: tests -->\n{FENCE}bash\n{FENCE}\n",
        f"<!-- command: tests -->\n{FENCE}bash\none\ntwo\n{FENCE}\n",
        f"<!-- command: tests -->\n{FENCE}bash\ngoes on \\\n{FENCE}\n",
        f"<!-- command: tests -->\n{FENCE}bash\nno end\n",
        f"<!-- command: tests -->\n{FENCE}\na\n{FENCE}\n" * 2,
    ],
)
def test_anything_but_one_line_is_refused(tmp_path: Path, text: str):
    readme = tmp_path / "README.md"
    readme.write_text(text)

    process = run("tests", "--readme", str(readme))

    assert process.returncode == 1
    assert str(readme) in process.stderr


def test_the_line_comes_out_as_it_stands(tmp_path: Path):
    readme = tmp_path / "README.md"
    readme.write_text(f"<!-- command: x -->\n\n{FENCE}bash\na '.[b]' && \"$c\" | d\n{FENCE}\n")

    assert run("x", "--readme", str(readme)).stdout == "a '.[b]' && \"$c\" | d\n"
