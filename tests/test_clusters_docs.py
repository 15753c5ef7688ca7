"""docs/clusters.md: its command lines are understood, its variables exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gpucoll import config
from gpucoll.launcher.arguments import parse
from gpucoll.rendezvous import meeting_points
from gpucoll.rendezvous.addresses import derived_port
from gpucoll.rendezvous.meet_argument import parse_meet

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "clusters.md").read_text("utf-8")
LINES = re.findall(r"^gpucoll-run (.*?)(?: +#.*)?$", TEXT, re.MULTILINE)


def test_there_are_lines():
    assert len(LINES) == 2


@pytest.mark.parametrize("line", LINES)
def test_command_lines(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPUCOLL_SECRET", "0123456789abcdef")
    monkeypatch.setattr(meeting_points, "is_local", lambda address: True)
    (tmp_path / "script.py").touch()
    options = parse(shlex.split(line))

    assert options.span is not None
    assert (options.ranks, options.span.world_size) == (4, 8)


def test_variables():
    known = {value for value in vars(config).values() if isinstance(value, str)}
    named = set(re.findall(r"GPUCOLL_[A-Z_]+", TEXT))

    assert named <= known
    assert {config.MEET, config.INTERFACES, config.HOST_ID, config.SECRET_FILE} <= named


def test_meeting_points():
    named = re.findall(r"(?:tcp|file)://[a-z0-9/][^\s`\"]*", TEXT)

    assert named
    for text in named:
        if "$" not in text:
            parse_meet(text.replace("PORT", "1"))


def test_the_range_of_ports_that_ids_stand_for():
    assert "10240 to 32767" in TEXT
    assert "10240 and 32767" in TEXT
    assert all(10240 <= derived_port(str(n)) <= 32767 for n in range(1000))
