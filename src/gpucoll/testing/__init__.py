"""A pytest plugin: tests whose body runs on several ranks, each in its own process.

pytest finds it by itself where gpucoll is installed (entry point ``gpucoll``); elsewhere say
``-p gpucoll.testing.plugin``. What users see is described in ``docs/testing.md``.
"""

from __future__ import annotations

# The entry point names this package, which only passes on: so the plugin has one name, its
# module's, whether pytest comes to it from here or by ``-p``, and is never registered twice.
pytest_plugins = ["gpucoll.testing.plugin"]
