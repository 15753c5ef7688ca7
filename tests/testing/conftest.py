"""Runs of pytest inside a test, with the plugin and the compiled loops that are there already."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from gpucoll import config
from gpucoll.kernels.cpu.cache import cache_folder

CACHE = cache_folder().parent  # before pytester gives the test a home of its own


@pytest.fixture
def inner(pytester, monkeypatch):
    """Run pytest on files: ``inner("-n2", test_name="source", conftest="source")``."""
    monkeypatch.setenv(config.CACHE_DIR, str(CACHE))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    # Installed plugins that are not meant take longer to load, in every rank, than a test takes.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(*arguments, **sources):
        for name, source in sources.items():
            (pytester.path / f"{name}.py").write_text(dedent(source))
        return pytester.runpytest_subprocess("-p", "gpucoll.testing.plugin", *arguments, timeout=90)

    return run


def is_running(pid):
    """Return whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
