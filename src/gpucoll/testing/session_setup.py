"""The settings of a rank's pytest session: the driver's, with some changed."""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import cloudpickle
import pytest

from gpucoll.testing import measuring

NOT_IN_RANKS: Options = {
    "capture": "no",  # the driver records a rank's output, so that it outlives a crash
    "collectonly": False,
    "cov_source": [],  # pytest-cov; see `measuring`
    "dist": "no",
    "failedfirst": False,
    "lf": False,
    "maxfail": 0,
    "newfirst": False,
    "numprocesses": None,
    "pastebin": None,
    "setuponly": False,
    "setupplan": False,
    "setupshow": False,
    "showlocals": True,
    "stepwise": False,
    "trace": False,
    "tx": [],
    "usepdb": False,
    "xmlpath": None,
}
"""Options that only concern the driver, or that need a terminal."""
Options: TypeAlias = dict[str, Any]
"""Options of pytest and its plugins, which decide the types of the values."""


@dataclass(frozen=True)
class SessionSetup:
    """The settings that all ranks' sessions share."""

    folder: str
    argv: list[str]
    arguments: list[str]
    options: Options
    workerinput: Options
    coverage: measuring.Settings | None
    basetemp: str
    """The folder in which each rank has a folder of its own."""

    def options_of(self, rank: int) -> Options:
        """Return a rank's options."""
        return {**self.options, "basetemp": str(Path(self.basetemp) / f"rank{rank}")}

    @classmethod
    def of(cls, config: pytest.Config, basetemp: Path) -> SessionSetup:
        """Return the settings for ranks from the driver's."""
        options = {name: value for name, value in vars(config.option).items() if travels(value)}
        options.update((name, value) for name, value in NOT_IN_RANKS.items() if name in options)
        if options.get("tbstyle") in ("line", "native", "no"):
            # tracebacks of ranks arrive as text, and the driver formats them
            options["tbstyle"] = "short"
        options["plugins"] = [*options["plugins"], "no:terminal"]
        options["pythonwarnings"] = [
            *(options.get("pythonwarnings") or []),
            # Ranks start with gpucoll loaded.
            "ignore::pytest.PytestAssertRewriteWarning",
        ]
        alone = {"workerid": "master", "testrunuid": secrets.token_hex(8), "mainargv": sys.argv}
        return cls(
            folder=str(config.invocation_params.dir),
            argv=list(sys.argv),
            arguments=[str(argument) for argument in config.args],
            options=options,
            workerinput=dict(getattr(config, "workerinput", alone)),
            coverage=measuring.current(),
            basetemp=str(basetemp),
        )


def travels(value: object) -> bool:
    """Return whether a value can be sent to another process."""
    try:
        cloudpickle.loads(cloudpickle.dumps(value))
    except Exception:
        return False
    return True
