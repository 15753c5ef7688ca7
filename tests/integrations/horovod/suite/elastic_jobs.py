"""Runs Horovod's tests of elastic jobs: ``FILE [arguments of pytest ...]``.

They call the runner's own modules, which have other names here, and shorten its pauses by name.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import unittest.mock
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gpucoll.integrations.horovod.alias import install


def stand_in() -> None:
    """Give the runner's modules the names that these tests know."""
    install()
    flags, driver, launch = (
        importlib.import_module(f"horovod.runner.{name}") for name in ("flags", "driver", "launch")
    )
    put("mock", **vars(unittest.mock))
    put("horovod.runner.common")
    put("horovod.runner.common.util", config_parser=flags)
    put("horovod.runner.elastic", constants=driver, driver=driver)
    put("horovod.runner.elastic.driver", driver)
    put("horovod.runner.gloo_run", _get_min_start_hosts=None)
    put("horovod.runner.util")
    put("horovod.runner.util.threads", in_thread=in_thread)
    vars(driver)["ELASTIC_TIMEOUT_SECS"] = None  # HOROVOD_ELASTIC_TIMEOUT is the way here
    assert vars(launch)["driver"] is driver


def put(name: str, module: ModuleType | None = None, **values: Any) -> None:
    """Put a module, or a new one with some values, where imports find it."""
    made = module or ModuleType(name)
    vars(made).update({key: value for key, value in values.items() if not key.startswith("__")})
    sys.modules[name] = made
    above, _, last = name.rpartition(".")
    if above:
        setattr(sys.modules[above], last, made)


def in_thread(target: Any, args: Any = ()) -> threading.Thread:
    """Start a daemon thread."""
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


def main(file: str, arguments: list[str]) -> int:
    stand_in()
    folder = Path(file).parent
    sys.path[:0] = [str(folder), str(folder.parent / "utils")]
    options = ["-v", "-p", "no:cacheprovider", "-p", "no:gpucoll", "-p", "no:xdist"]
    options += ["--rootdir", str(folder.parent), "-c", os.devnull, "--tb=short", "-rsf"]
    return int(pytest.main([*options, *arguments, file]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
