"""How programs are named by those that watch them."""

from __future__ import annotations

import pytest

from gpucoll.observe import processes
from gpucoll.observe.follow import _script_of

FOLDER = "/srv/" + "deep/" * 20


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["train.py", "--lr", "0.1"], "train.py --lr 0.1"),
        ([f"{FOLDER}train.py", "--lr", "0.1"], "train.py --lr 0.1"),
        (["-c", "import time\n\x1b[2Jtime"], "-c import time [2Jtime"),
        (["train.py", "x" * 60], "train.py " + "x" * 48 + "..."),
    ],
)
def test_a_program_is_one_short_line(arguments, shown, tmp_path, monkeypatch):
    (tmp_path / "7").mkdir()
    line = "".join(f"{word}\0" for word in ["/usr/bin/python3", *arguments])
    (tmp_path / "7" / "cmdline").write_text(line)
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    assert processes.program_of(7) == shown
    assert len(shown) <= 60


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("/srv/job/train.py --token abc", "train.py"),
        ("-u -W ignore -X dev /srv/train.py", "train.py"),
        ("-m package.train --token abc", "package.train"),
        ("-c import os; os.abort()", "-c"),
        ("-i", ""),
        ("", ""),
    ],
)
def test_the_name_of_a_program_has_no_arguments(program, name):
    """They may contain secrets, and a metric is shown to many."""
    assert _script_of(program) == name
