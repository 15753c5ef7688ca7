"""A pytest plugin for tests whose body runs on several ranks, each in its own process.

pytest finds the plugin where gpucoll is installed (entry point ``gpucoll``); elsewhere pass ``-p
gpucoll.testing.plugin``. ``docs/testing.md`` describes its use.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

# The entry point names this package, which only forwards to the module. So the plugin has one name,
# and pytest registers it only once, whether it comes from here or from ``-p``.
pytest_plugins = ["gpucoll.testing.plugin"]


class _AsInstalled:
    """Finds gpucoll's modules before pytest's own finder does.

    pytest's finder compiles every module of a distribution with a plugin again, to rewrite its
    asserts, and keeps the result only if bytecode may be written. A process forked by a test would
    spend most of a second on it (docs/testing.md).
    """

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(name, path, target) if name.startswith("gpucoll.") else None


sys.meta_path.insert(0, _AsInstalled)
