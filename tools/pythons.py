"""Print the Pythons that the README names, oldest first, with interpreters on this machine.

::

    python tools/pythons.py

It prints one line for each: its version, and the path of a working interpreter, or nothing if there
is none. Interpreters are searched on PATH and among pyenv's versions. A command on PATH that does
not run is skipped: pyenv provides one for each version, even if it is not activated.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
_ANSWER_S = 30.0


def promised(text: str | None = None) -> list[str]:
    """Return the versions that the README's section on platforms names, oldest first."""
    text = README.read_text(encoding="utf-8") if text is None else text
    _, _, platforms = text.partition("\n## Platforms\n")
    found = set(re.findall(r"\b3\.\d+\b", platforms.partition("\n## ")[0]))
    if not found:
        raise ValueError("the README's section on platforms names no version of Python")
    return sorted(found, key=_number)


def find(version: str) -> Path | None:
    """Return a working interpreter of a version such as 3.10; None if there is none."""
    return next((each for each in _candidates(version) if _runs_as(each, version)), None)


def _candidates(version: str) -> Iterator[Path]:
    found = shutil.which(f"python{version}")
    if found is not None:
        yield Path(found)
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    installed = [*root.glob(f"versions/{version}.*/bin/python3")]
    yield from sorted(installed, key=lambda path: _number(path.parts[-3]), reverse=True)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _runs_as(path: Path, version: str) -> bool:
    command = [str(path), "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.strip() == version


def main() -> int:
    """Print the lines."""
    for version in promised():
        print(version, find(version) or "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
