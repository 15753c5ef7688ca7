"""A loop that few programs need: compiled once, kept, and not there for those who do not use it."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from gpucoll import config
from gpucoll.devices.host.loop import put_command
from gpucoll.kernels.cpu import cache, packaged

# Not one between hosts, which the package's machine code may have.
USES = "from gpucoll.devices.host.loop import put_command; put_command.address"
ONE_HOST = "import gpucoll, numpy; gpucoll.init().all_reduce(numpy.ones(3))"


def modules_after(program: str) -> set[str]:
    """Return what a process has imported that ran a program."""
    command = [sys.executable, "-c", f"{program}; import sys; print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.split())


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A cache of its own, with all loops of one host and that one; where the latter is."""
    modules_after(ONE_HOST)
    if not cache.is_complete():
        pytest.skip("compiled loops cannot be kept here")
    folder = tmp_path / cache.cache_folder().name
    if not packaged.fit().files:  # otherwise nothing else is needed there
        shutil.copytree(cache.cache_folder(), folder)
    tmp_path.chmod(0o700)
    monkeypatch.setenv(config.CACHE_DIR, str(tmp_path))
    modules_after(USES)
    return folder / put_command.path().name


def test_who_needs_it_next_imports_no_compiler(kept):
    assert not modules_after(USES) & {"numba", "llvmlite"}


@pytest.mark.soak
def test_a_damaged_one_is_made_anew(kept):
    good = kept.read_bytes()
    kept.write_bytes(good[:1000] + b"?" + good[1001:])

    assert "numba" in modules_after(USES)

    assert not modules_after(USES) & {"numba", "llvmlite"}


def test_one_host_has_none_of_it(kept):
    modules = modules_after(ONE_HOST)
    assert not {name for name in modules if name.startswith("gpucoll.transport.tcp")}
    assert "gpucoll.kernels.cpu.kept_loops" not in modules


@pytest.mark.soak
def test_processes_that_need_it_at_once(kept):
    """One compiles, and the others wait for it."""
    kept.unlink()
    program = f"{USES}; import sys; print('numba' in sys.modules)"
    started = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    compiled = [process.communicate(timeout=120)[0].strip() for process in started]
    assert sorted(compiled) == ["False", "False", "True"]
