"""How work that takes long shows itself in a run of pytest, which captures what tests write."""

from __future__ import annotations

import contextlib

import pytest

from gpucoll.progress import WAITING, Display


class VisibleDisplay:
    """Shows texts on the stderr of pytest itself; see `gpucoll.progress.Show`."""

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager
        self._is_worker = hasattr(config, "workerinput")
        # Workers of pytest-xdist share the terminal with their controller.
        self._display = Display(in_place=False if self._is_worker else None)
        self._start = "\n" if self._is_worker else ""

    def __call__(self, text: str, stays: bool) -> None:
        """Show a text below what pytest has written."""
        if self._is_worker and text.startswith(WAITING):
            return  # one of many
        capture = self._plugins.get_plugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
            if (reporter := self._plugins.get_plugin("terminalreporter")) is not None:
                reporter.ensure_newline()
                reporter.flush()
            self._display(self._start + text, stays)
        self._start = ""
