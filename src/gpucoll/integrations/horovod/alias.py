"""Make ``import horovod`` load this package, for programs that should not be changed."""

from __future__ import annotations

from gpucoll.integrations.aliases import Alias

ELSEWHERE = {
    "common": "",
    "common.basics": "basics",
    "common.elastic": "elastic",
    "common.exceptions": "exceptions",
    "common.process_sets": "process_sets",
    "common.util": "basics",
}
"""Modules of Horovod, and where they are here, if not under the same name."""


def install() -> None:
    """Make ``import horovod`` load this package in this process from now on.

    An installed Horovod is not touched, and not found.
    """
    Alias("horovod", __name__.rpartition(".")[0], ELSEWHERE).install()
