"""docs/security.md: its commands make certificates that serve, its variables exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from gpucoll import config
from gpucoll.transport.tcp.credentials import job_tls

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "security.md").read_text("utf-8")


def test_variables():
    known = {value for value in vars(config).values() if isinstance(value, str)}
    named = set(re.findall(r"GPUCOLL_[A-Z_]*[A-Z]\b", TEXT))

    assert named <= known
    assert {config.SECRET_FILE, config.TLS_CERT, config.TLS_KEY, config.TLS_CA} <= named


def test_three_commands_make_certificates(tmp_path, monkeypatch):
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    commands = re.findall(r"^openssl .*", TEXT, re.MULTILINE)
    (settings,) = re.findall(r"^export (GPUCOLL_TLS_CERT=.*)", TEXT, re.MULTILINE)
    assert len(commands) == 3

    for command in commands:
        line = shlex.split(command)
        subprocess.run(line, check=True, capture_output=True, cwd=tmp_path, timeout=60)
    for setting in settings.split():
        name, _, path = setting.partition("=")
        monkeypatch.setenv(name, path.replace("$PWD", str(tmp_path)))

    assert job_tls("rank 0 of 1") is not None
