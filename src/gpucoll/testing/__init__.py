"""A pytest plugin: tests whose body runs on several ranks, each in its own process.

pytest finds it by itself where gpucoll is installed (entry point ``gpucoll``); elsewhere say
``-p gpucoll.testing.plugin``. What users see is described in ``docs/testing.md``.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

# The entry point names this package, which only passes on: so the plugin has one name, its
# module's, whether pytest comes to it from here or by ``-p``, and is never registered twice.
pytest_plugins = ["gpucoll.testing.plugin"]


class _AsInstalled:
    """Finds gpucoll's modules before pytest's own finder does.

    That one compiles every module of a distribution with a plugin anew, to rewrite its asserts, and
    keeps the result only where bytecode may be written. A process that is forked by a test would
    spend most of a second on it (docs/testing.md).
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, path, target) if name.startswith("gpucoll.") else None


sys.meta_path.insert(0, _AsInstalled)
