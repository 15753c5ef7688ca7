"""Environment variables: those that nobody knows, and what a strange environment leads to."""

from __future__ import annotations

import ctypes
import os
import pwd
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import gpucoll
from gpucoll import config
from gpucoll.errors import ArgumentError, SharedMemoryError
from gpucoll.memory.arena import Arena


@pytest.fixture(autouse=True)
def each_says_so_again():
    config.warn_of_unknown_variables.cache_clear()


class TestUnknownVariables:
    @pytest.fixture(autouse=True)
    def none_but_those_of_a_test(self, monkeypatch):
        for name in config.unknown_variables():
            monkeypatch.delenv(name)

    def wrong_init(self):
        """Call init, which ends before anything is done."""
        with pytest.raises(ArgumentError):
            gpucoll.init(backend="fast")

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("GPUCOLL_TIMEOUT", "did you mean GPUCOLL_TIMEOUT_S?"),
            ("GPUCOLL_CACHEDIR", "did you mean GPUCOLL_CACHE_DIR?"),
            ("GPUCOLL_FASTER", "docs/api.md lists"),
        ],
    )
    def test_init_warns(self, monkeypatch, name, said):
        monkeypatch.setenv(name, "1")
        with pytest.warns(RuntimeWarning, match=f"knows no environment variable {name}, .*{said}"):
            self.wrong_init()

    def test_once(self, monkeypatch):
        monkeypatch.setenv("GPUCOLL_FASTER", "1")
        with pytest.warns(RuntimeWarning) as seen:
            self.wrong_init()
        assert [warning.filename for warning in seen] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.wrong_init()

    @pytest.mark.parametrize(
        "name", ["GPUCOLL_TIMEOUT_S", "GPUCOLL_SECRET", "GPUCOLL_TEST_MPI", "OTHER"]
    )
    def test_others_are_left_alone(self, monkeypatch, name):
        monkeypatch.setenv(name, "5")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.wrong_init()

    def test_one_rank_of_a_host_warns(self, monkeypatch):
        monkeypatch.setenv("GPUCOLL_FASTER", "1")
        monkeypatch.setenv(config.LOCAL_RANK, "1")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.wrong_init()


class TestHome:
    @pytest.fixture(autouse=True)
    def home(self, monkeypatch, tmp_path):
        user = pwd.getpwuid(os.geteuid())
        entry = pwd.struct_passwd((*user[:5], str(tmp_path), user.pw_shell))
        monkeypatch.setattr(pwd, "getpwuid", lambda _: entry)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        return tmp_path

    def test_an_empty_one_is_none(self, monkeypatch, home):
        monkeypatch.setenv("HOME", "")
        assert config.usual_cache_dirs()[0] == home / ".cache" / "gpucoll"

    def test_without_one(self, monkeypatch, home):
        monkeypatch.delenv("HOME")
        assert config.usual_cache_dirs()[0] == home / ".cache" / "gpucoll"

    def test_of_a_user_who_is_not_known(self, monkeypatch):
        def unknown(_):
            raise KeyError

        monkeypatch.setattr(pwd, "getpwuid", unknown)
        monkeypatch.setenv("HOME", "")
        assert Path("/.cache/gpucoll") not in config.usual_cache_dirs()


def test_a_lack_of_address_space_says_what_can_be_set():
    with pytest.raises(SharedMemoryError, match=r"ulimit -v\), set GPUCOLL_ARENA_BYTES to less"):
        Arena(1 << 47)  # all that a process has


# --- programs that have more rights than their caller ---------------------------------------------

AS_SET_UID = """
import os, sys
from gpucoll import config
for name in sys.argv[1:]:
    os.environ[name] = "/of/the/caller"
os.setresuid(12345, 0, 0)
for name in sys.argv[1:]:
    try:
        print(repr(config.variable(name)))
    except config.ArgumentError as error:
        print(str(error)[:60])
"""


def test_a_set_uid_program_loads_no_code_that_its_caller_names():
    if os.geteuid() != 0:
        pytest.skip("only root can run as another user")
    names = [config.NCCL_LIBRARY, config.NVRTC_LIBRARY, config.CUDA_PATH, config.SECRET_FILE]
    command = [sys.executable, "-c", AS_SET_UID, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.splitlines() == [
        "GPUCOLL_NCCL_LIBRARY is set, but this process has more right",
        "GPUCOLL_NVRTC_LIBRARY is set, but this process has more righ",
        "''",
        "'/of/the/caller'",
    ]


def test_a_program_with_capabilities_loads_no_code_that_its_caller_names(monkeypatch):
    monkeypatch.setenv(config.NCCL_LIBRARY, "/of/the/caller")
    assert config.variable(config.NCCL_LIBRARY) == "/of/the/caller"

    class Libc:
        @staticmethod
        def getauxval(kind):
            return int(kind == 23)  # AT_SECURE

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Libc)
    with pytest.raises(ArgumentError, match=r"GPUCOLL_NCCL_LIBRARY is set.*unset it"):
        config.variable(config.NCCL_LIBRARY)
