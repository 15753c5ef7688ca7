"""What a launcher imports: next to nothing, since nobody's rank starts before it has."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpucoll.backends import precompile

HEAVY = [
    *("numpy", "numba", "llvmlite", "hashlib", "importlib.metadata", "secrets", "shutil"),
    *("tempfile", "asyncio", "multiprocessing", "platform", "dataclasses", "inspect", "logging"),
    *("gpucoll.api", "gpucoll.kernels.cpu.jit", "gpucoll.kernels.cpu.library"),
]
LAUNCH = f"""\
import sys
before = set(sys.modules)
from gpucoll.launcher import cli
code = cli.main(["-n", "2", sys.executable, "-c", "pass"])
print(code, [name for name in {HEAVY!r} if name in sys.modules and name not in before])
"""


def test_gpucoll_run():
    precompile.ensure_compiled()
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("0 []\n", "")


@pytest.mark.parametrize("name", ["sh", "/bin/sh", "./x", "none at all", "."])
def test_programs_are_found_as_the_shell_finds_them(name, tmp_path, monkeypatch):
    import shutil

    from gpucoll.launcher.arguments import which

    monkeypatch.chdir(tmp_path)
    assert which(name) == shutil.which(name)
    (tmp_path / "x").write_text("#!/bin/sh\n")
    assert which(name) == shutil.which(name)
    (tmp_path / "x").chmod(0o755)
    assert which(name) == shutil.which(name)
