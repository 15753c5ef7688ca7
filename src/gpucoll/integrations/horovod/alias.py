"""Make ``import horovod`` load this package, for programs that should not be changed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gpucoll.integrations.aliases import Alias
from gpucoll.integrations.horovod.settings import Place
from gpucoll.integrations.old_numpy import BeforeMXNet

ELSEWHERE = {
    "common": "",
    "common.basics": "basics",
    "common.elastic": "elastic",
    "common.exceptions": "exceptions",
    "common.process_sets": "process_sets",
    "common.util": "util",
}
"""Modules of Horovod, and where they are here, if not under the same name."""


def install() -> None:
    """Make ``import horovod`` load this package in this process from now on.

    An installed Horovod is not touched, and not found. If a launcher of gpucoll has started this
    process, ``HOROVOD_RANK`` and the like tell its place, for programs that read them before
    `init`. Processes that multiprocessing spawns find the same names, because sys.path has a folder
    for them.
    """
    if place := Place.from_launcher():
        os.environ.update(place.variables())
    sys.meta_path.insert(0, BeforeMXNet())
    Alias("horovod", __name__.rpartition(".")[0], ELSEWHERE).install()
    folder = str(Path(__file__).with_name("for_children"))
    if folder not in sys.path:
        sys.path.insert(1, folder)  # before an installed Horovod, behind the program's folder
