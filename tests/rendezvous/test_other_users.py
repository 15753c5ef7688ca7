"""Other users at the sockets of a job: processes of theirs, which root can start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from gpucoll import config
from gpucoll.errors import AuthenticationError, RendezvousError
from gpucoll.rendezvous.notices import address, notices_address

STRANGER = 12345
CLONE_NEWUSER = 0x10000000


@pytest.fixture(autouse=True)
def _root():
    if os.geteuid() != 0:
        pytest.skip("only root can run a process as another user")


def as_stranger(work):
    """Return a child that runs as another user, once it says that it is ready."""
    ready, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            work(lambda: os.write(says, b"!"))
        finally:
            os._exit(0)
    os.close(says)
    try:
        assert os.read(ready, 1) == b"!"
    except BaseException:
        end(pid)
        raise
    finally:
        os.close(ready)
    return pid


def end(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def take(*names):
    """Listen at abstract addresses, and keep whoever comes."""

    def work(ready):
        listeners = [socket.socket(socket.AF_UNIX) for _ in names]
        for listener, name in zip(listeners, names, strict=True):
            listener.bind(name)
            listener.listen(64)
        ready()
        signal.pause()

    return work


def knock(name):
    """Connect again and again, and say something."""

    def work(ready):
        ready()
        while True:
            with socket.socket(socket.AF_UNIX) as end:
                end.settimeout(0.1)
                try:
                    end.connect(name)
                    end.sendall(b"\0" * 64)
                    end.recv(64)
                except OSError:
                    continue

    return work


def join(seat, token):
    import gpucoll

    place = {config.RANK: seat.rank, config.WORLD_SIZE: seat.world_size, config.JOB: token}
    os.environ.update({name: str(value) for name, value in place.items()})
    with gpucoll.init(timeout_s=20.0) as comm:
        return comm.all_reduce(1)


def test_a_stranger_that_has_taken_the_name_of_the_job(fresh):
    token = f"taken {os.getpid()}"
    pid = as_stranger(take(address(f"{token}#0"), notices_address(token)))
    try:
        errors = fresh(3, join, token)
    finally:
        end(pid)

    assert isinstance(errors[0], RendezvousError)
    assert {type(error) for error in errors[1:]} == {AuthenticationError}
    for error in errors:
        assert f"process {pid} of user {STRANGER} is at the job's socket" in str(error)


def test_a_stranger_that_knocks_while_ranks_meet(fresh):
    token = f"knocked at {os.getpid()}"
    pid = as_stranger(knock(address(f"{token}#0")))
    try:
        assert fresh(3, join, token) == [3] * 3
    finally:
        end(pid)


IN_A_NAMESPACE = f"""
import ctypes, os, socket, sys
from gpucoll.rendezvous import frames
from gpucoll.rendezvous.notices import address
name = address(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
print(os.strerror(ctypes.get_errno()) if libc.unshare({CLONE_NEWUSER}) else "", flush=True)
sys.stdin.readline()  # until users are mapped
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(name)
    listener.listen()
    with socket.socket(socket.AF_UNIX) as own:
        own.connect(name)
        print(frames.peer_process(listener.accept()[0]) == os.getpid(), flush=True)
    try:
        print(frames.peer_process(listener.accept()[0]))
    except Exception as error:
        print(error)
"""


def test_nobody_of_a_user_namespace_is_not_everybody_outside_of_it():
    """There the kernel gives all users whom the namespace does not know the number 65534."""
    name = f"namespace {os.getpid()}"
    command = [sys.executable, "-c", IN_A_NAMESPACE, name]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as inside:
        assert inside.stdin is not None
        assert inside.stdout is not None
        try:
            if problem := inside.stdout.readline().strip():
                pytest.skip(f"no user namespace can be made here: {problem}")
            for kind in ("uid", "gid"):
                with open(f"/proc/{inside.pid}/{kind}_map", "w") as file:
                    file.write("0 100000 65536")
            inside.stdin.write("\n")
            inside.stdin.flush()
            assert inside.stdout.readline() == "True\n"
            end(as_stranger(come_to(address(name))))
            text = inside.stdout.read()
        finally:
            inside.kill()

    assert "its user is unknown: this rank runs as user 65534" in text


def come_to(name):
    def work(ready):
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(name)
            ready()
            signal.pause()

    return work
