"""What ``horovodrun`` tells the ranks of an elastic job: a file that it replaces at each change."""

from __future__ import annotations

import contextlib
import enum
import json
import os
from collections.abc import Sequence
from typing import NamedTuple

from gpucoll.integrations.horovod.settings import variable_of

__all__ = ["NEWS", "PLACE", "HostUpdateResult", "News", "read_news", "write_news"]

NEWS = variable_of("ELASTIC_NEWS")
"""The variable with the file's path."""
PLACE = variable_of("ELASTIC_PLACE")
"""The variable with this process's place, which it keeps, whatever its rank is."""


class HostUpdateResult(enum.IntFlag):
    """How the places for ranks have changed."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class News(NamedTuple):
    """What the launcher wants the job to be."""

    serial: int = 0
    """Counts the changes."""
    update: int = 0
    """A `HostUpdateResult`: what the last change was."""
    size: int = 0
    """The number of ranks to wait for. 0: newcomers are let in when they are here."""
    least: int = 1
    """The job waits if fewer are left."""
    leaving: Sequence[int] = ()
    """Places whose processes are to leave the job, and end."""


def write_news(path: str, news: News) -> None:
    """Replace the file."""
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(news._asdict(), file)
    os.replace(f"{path}.new", path)


def read_news(path: str | None) -> News:
    """Return what the file says; news of nothing if there is none."""
    if path:
        with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
            return News(**json.load(file))
    return News()
