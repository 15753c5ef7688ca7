"""Print one of the README's commands, exactly as it is written there.

::

    python tools/readme_commands.py bench
    python tools/readme_commands.py tests

In README.md a command is the only line of the fenced block below its marker::

    <!-- command: bench -->
    ```bash
    the command
    ```
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def command(text: str, name: str) -> str:
    """Return the command in `text` that is marked with `name`.

    Raises
    ------
    ValueError
        The marker is not there exactly once, or no block with exactly one line follows it.
    """
    lines = [line.strip() for line in text.splitlines()]
    marker = f"<!-- command: {name} -->"
    if lines.count(marker) != 1:
        raise ValueError(f"{marker} is there {lines.count(marker)} times; expected once")
    block = lines[lines.index(marker) + 1 :]
    fence = next((index for index, line in enumerate(block) if line), None)
    if fence is None or not block[fence].startswith("```"):
        raise ValueError(f"{marker} is not followed by a fenced block")
    if "```" not in block[fence + 1 :]:
        raise ValueError(f"the block after {marker} has no end")
    body = block[fence + 1 : block.index("```", fence + 1)]
    if len(body) != 1 or not body[0] or body[0].endswith("\\"):
        raise ValueError(f"the block after {marker} has {len(body)} lines; expected one command")
    return body[0]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Print one of the README's commands.")
    parser.add_argument("name", help="bench or tests")
    parser.add_argument("--readme", type=Path, default=README, help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        print(command(options.readme.read_text(encoding="utf-8"), options.name))
    except ValueError as error:
        print(f"{options.readme}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
