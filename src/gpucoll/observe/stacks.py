"""The Python stacks of processes, by py-spy, which reads them without stopping the process."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from gpucoll.wording import range_of_ranks

__all__ = ["Stack", "missing", "read_stack", "tree_of"]

LIMIT_S = 10.0
_AT_A_TIME = 4
_OF_GPUCOLL = re.compile(
    r"/gpucoll/(api|arrays|backends|calls|entries|group|integrations|kernels|rendezvous|transport)/"
)


@dataclass(frozen=True)
class Stack:
    """The frames of a process's main thread, the outermost first; or why they cannot be read."""

    frames: tuple[str, ...] = ()
    trouble: str = ""

    @property
    def caller(self) -> str:
        """The innermost frame that is no part of gpucoll; empty if there is none."""
        own = [frame for frame in self.frames if not _OF_GPUCOLL.search(frame)]
        return own[-1] if own else ""


def missing() -> str:
    """Return what to install if stacks cannot be read; empty: they can."""
    return (
        ""
        if _program()
        else "stacks and callers' lines need py-spy: pip install 'gpucoll[observe]'"
    )


def _program() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def read_stacks(pids: Sequence[int], limit_s: float = LIMIT_S) -> dict[int, Stack]:
    """Return the stacks of processes, several at a time; none if they cannot be read.

    Those that are not there after `limit_s` seconds are left out.
    """
    if _program() is None:
        return {}
    until = time.monotonic() + limit_s

    def read(pid: int) -> Stack:
        left_s = until - time.monotonic()
        return read_stack(pid, left_s) if left_s > 0 else Stack(trouble="there was no time for it")

    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return dict(zip(pids, pool.map(read, pids), strict=True))


def read_stack(pid: int, limit_s: float = LIMIT_S) -> Stack:
    """Return the stack of a process's main thread; the process runs on meanwhile."""
    program = _program()
    if program is None:
        return Stack(trouble=missing())
    command = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
        if ended.returncode:
            lines = ended.stderr.strip().splitlines() or ["py-spy failed"]
            return Stack(trouble=lines[0].removeprefix("Error: "))
        threads = json.loads(ended.stdout)
        main = next((one for one in threads if one["thread_name"] == "MainThread"), threads[0])
        return Stack(tuple(_shown(frame) for frame in reversed(main["frames"])))
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, IndexError) as error:
        return Stack(trouble=f"py-spy gave nothing: {error!r}")


def _shown(frame: dict[str, object]) -> str:
    return f"{frame['name']} ({frame['filename']}:{frame['line']})"


# --- many stacks as one tree ----------------------------------------------------------------------


@dataclass
class _Node:
    ranks: list[int] = field(default_factory=list)
    below: dict[str, _Node] = field(default_factory=dict)


def tree_of(stacks: dict[int, Stack]) -> Iterator[str]:
    """Yield the lines of the tree of all ranks' frames; each names the ranks that are in it."""
    top = _Node()
    for rank, stack in stacks.items():
        node = top
        for frame in stack.frames or (f"no stack: {stack.trouble}",):
            node = node.below.setdefault(frame, _Node())
            node.ranks.append(rank)
    yield from _lines(top, 0)


def _lines(node: _Node, depth: int) -> Iterator[str]:
    for frame, below in sorted(node.below.items(), key=lambda item: len(item[1].ranks)):
        chain, deepest = [frame], below
        while len(deepest.below) == 1:  # frames that the same ranks are in need one line each
            ((frame, after),) = deepest.below.items()
            if after.ranks != deepest.ranks:
                break
            chain.append(frame)
            deepest = after
        yield f"{'  ' * depth}{range_of_ranks(below.ranks)}"
        yield from (f"{'  ' * depth}  {each}" for each in chain)
        yield from _lines(deepest, depth + 1)
