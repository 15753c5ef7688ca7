"""Where the job's secret comes from, and what is refused as one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gpucoll.errors import ArgumentError, AuthenticationError
from gpucoll.transport.tcp.secret import MOST_SECRET_BYTES, job_secret, missing_secret_error

SECRET = "0123456789abcdef"


@pytest.fixture(autouse=True)
def _no_secret_of_the_users(monkeypatch):
    monkeypatch.delenv("GPUCOLL_SECRET", raising=False)
    monkeypatch.delenv("GPUCOLL_SECRET_FILE", raising=False)


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    monkeypatch.setenv("GPUCOLL_SECRET_FILE", str(path))
    return path


def refused(*texts):
    with pytest.raises(ArgumentError) as caught:
        job_secret()
    for text in texts:
        assert text in str(caught.value)
    assert SECRET not in str(caught.value)


def test_none(monkeypatch):
    assert job_secret() is None
    monkeypatch.setenv("GPUCOLL_SECRET", "")
    monkeypatch.setenv("GPUCOLL_SECRET_FILE", "")
    assert job_secret() is None


def test_in_the_variable(monkeypatch):
    monkeypatch.setenv("GPUCOLL_SECRET", SECRET)
    assert job_secret() == SECRET.encode()


def test_bytes_that_are_no_text(monkeypatch):
    monkeypatch.setitem(os.environb, b"GPUCOLL_SECRET", b"\xff\xfe" * 10)
    assert job_secret() == b"\xff\xfe" * 10


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_in_a_file(file, end, mode):
    file.chmod(0o600)
    file.write_bytes(f"{SECRET}{end}".encode())
    file.chmod(mode)
    assert job_secret() == SECRET.encode()


def test_through_a_link(file, tmp_path, monkeypatch):
    link = tmp_path / "link"
    link.symlink_to(file)
    monkeypatch.setenv("GPUCOLL_SECRET_FILE", str(link))
    assert job_secret() == SECRET.encode()


@pytest.mark.parametrize("n_bytes", [MOST_SECRET_BYTES, MOST_SECRET_BYTES - 1])
def test_the_longest(file, n_bytes):
    file.write_bytes(b"x" * n_bytes + b"\n")
    assert job_secret() == b"x" * n_bytes


def test_only_the_end_of_the_line_is_left_out(file):
    file.write_text(f" {SECRET} \n\n")
    assert job_secret() == f" {SECRET} \n".encode()


# --- refused --------------------------------------------------------------------------------------


def test_both(file, monkeypatch):
    monkeypatch.setenv("GPUCOLL_SECRET", SECRET)
    refused("both GPUCOLL_SECRET and GPUCOLL_SECRET_FILE are set", "unset one")


def test_too_short(file, monkeypatch):
    file.write_text("fifteen bytes..\n")
    refused(str(file), "15 bytes, but at least 16 are needed", "secrets.token_hex(32)")
    file.write_text("")
    refused("0 bytes")
    monkeypatch.delenv("GPUCOLL_SECRET_FILE")
    monkeypatch.setenv("GPUCOLL_SECRET", "fifteen bytes..")
    refused("GPUCOLL_SECRET holds", "secrets.token_hex(32)")


@pytest.mark.parametrize("n_bytes", [MOST_SECRET_BYTES + 1, 1 << 20])
def test_too_long(file, n_bytes):
    file.write_bytes(b"x" * n_bytes)
    refused("more than the 4096 bytes")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o666])
def test_open_to_others(file, mode):
    file.chmod(mode)
    refused(f"mode {mode:o}", f"chmod 600 {file}")


def test_somebody_elses(file, monkeypatch):
    user = file.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    if user == 0:
        assert job_secret() == SECRET.encode()  # root's will do for everybody who can read it
        os.chown(file, 4711, -1)
        user = 4711
    refused(f"belongs to user {user}")


def test_no_file(file, tmp_path, monkeypatch):
    file.unlink()
    refused("cannot be opened: No such file")
    os.mkfifo(file, 0o600)  # nobody writes: it would wait for ever
    refused("no regular file")
    monkeypatch.setenv("GPUCOLL_SECRET_FILE", str(tmp_path))
    refused("no regular file")
    monkeypatch.setenv("GPUCOLL_SECRET_FILE", "/dev/zero")
    refused("no regular file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_cannot_be_read(file):
    file.chmod(0o200)
    refused("cannot be opened: Permission denied")


def test_what_mends_a_missing_one():
    error = missing_secret_error("rank 1 of 4")
    assert isinstance(error, AuthenticationError)
    for text in ("rank 1 of 4 must", "GPUCOLL_SECRET,", "GPUCOLL_SECRET_FILE", "token_hex(32)"):
        assert text in str(error)


def test_the_command_makes_one(monkeypatch):
    command = str(missing_secret_error("rank 0 of 2")).partition('python -c "')[2].partition('"')[0]
    made = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True, timeout=60
    )
    monkeypatch.setenv("GPUCOLL_SECRET", made.stdout.strip())
    assert job_secret() == made.stdout.strip().encode()


def test_one_host_imports_none_of_it():
    program = (
        "import sys, gpucoll\n"
        "with gpucoll.init() as comm:\n"
        "    comm.barrier()\n"
        "print([name for name in sys.modules if 'transport.tcp' in name])\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True
    )
    assert process.stdout.strip() == "[]"
