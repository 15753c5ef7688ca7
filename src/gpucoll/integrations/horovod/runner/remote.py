"""Ranks on several hosts: gpucoll's launcher on each of them, on other hosts through ssh."""

from __future__ import annotations

import argparse
import os
import random
import secrets
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby

from gpucoll import config
from gpucoll.integrations.horovod.runner.hosts import is_local
from gpucoll.integrations.horovod.runner.ranks import Slot, with_door
from gpucoll.integrations.horovod.settings import variable_of

__all__ = ["run_on_hosts"]

_SSH_TRIALS = 3
_SSH_CONNECT_S = 10
_ENDING_S = 10.0
_FORWARDED = (config.HOROVOD, "GPUCOLL_", "NCCL_", "PYTHON", "LD_LIBRARY_PATH", "PATH")
"""The beginnings of the names of variables that ranks on other hosts get, too."""
_NEVER = (config.SECRET, config.RANK, config.LOCAL_RANK, config.JOB, config.HOST_ID)
_FIRST_PORT, _LAST_PORT = 29_500, 29_999


def run_on_hosts(
    args: argparse.Namespace, slots: Sequence[Slot], environment: Mapping[str, str]
) -> int:
    """Run a job on several hosts; return its exit code.

    Raises
    ------
    ValueError
        A host cannot be reached by ssh; the message has the commands to type on each.
    """
    counts = {host: len([*same]) for host, same in groupby(slots, key=lambda slot: slot.host)}
    hosts = list(counts)
    port = random.randint(_FIRST_PORT, _LAST_PORT)
    first = socket.gethostname() if is_local(hosts[0]) else hosts[0]
    common = ["--nodes", str(len(hosts)), "--meet", f"{first}:{port}"]
    common += ["-n", ",".join(map(str, counts.values()))]
    lines = {
        host: [*common, "--node-rank", str(node), *with_door(args.command)]
        for node, host in enumerate(hosts)
    }
    reach = _ssh(args)
    if bad := [host for host in hosts if not is_local(host) and not _is_reached(reach, host)]:
        typed = "\n".join(f"  {host}: gpucoll-run {shlex.join(lines[host])}" for host in hosts)
        raise ValueError(
            f"could not connect to some hosts via ssh: {', '.join(bad)}. Start the ranks of each "
            f"host there, with the same {config.SECRET} in every terminal:\n{typed}"
        )
    secret = config.variable(config.SECRET) or secrets.token_hex(32)
    variables = {**environment, **_forwarded()}
    started: list[subprocess.Popen[str]] = []
    try:
        for host, line in lines.items():
            its = {**variables, variable_of("HOSTNAME"): host}
            started.append(_start(reach, host, line, its, secret))
        codes = [process.wait() for process in started]
        return next((code for code in codes if code), 0)
    finally:
        for process in started:
            process.terminate()
        for process in started:
            try:
                process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ssh(args: argparse.Namespace) -> list[str]:
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SSH_CONNECT_S}"]
    options += ["-p", str(args.ssh_port)] if args.ssh_port else []
    options += ["-i", args.ssh_identity_file] if args.ssh_identity_file else []
    return ["ssh", *options]


def _is_reached(reach: Sequence[str], host: str) -> bool:
    for _ in range(_SSH_TRIALS):
        try:
            done = subprocess.run(
                [*reach, host, "true"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=2 * _SSH_CONNECT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return True
    return False


def _forwarded() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_FORWARDED) and name not in _NEVER
    }


def _start(
    reach: Sequence[str], host: str, line: Sequence[str], variables: Mapping[str, str], secret: str
) -> subprocess.Popen[str]:
    """Start gpucoll's launcher on a host; the secret goes through its standard input."""
    launcher = [sys.executable, "-m", "gpucoll", "run", *line]
    if is_local(host):
        environment = {**os.environ, **variables, config.SECRET: secret}
        return subprocess.Popen(launcher, env=environment, text=True)
    settings = shlex.join(f"{name}={value}" for name, value in variables.items())
    script = (
        f"cd {shlex.quote(os.getcwd())} && read -r {config.SECRET} && export {config.SECRET} && "
        f"exec env {settings} {shlex.join(launcher)}"
    )
    process = subprocess.Popen([*reach, host, script], stdin=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write(f"{secret}\n")
    process.stdin.flush()
    return process
