"""A Slurm cluster on this machine, for as long as a test needs it: two nodes, root, 2 s.

Debian's packages: ``apt-get install slurm-wlm munge``. All that it writes lies in a folder of its
own; nothing of an installed cluster's is looked at.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "scontrol")
NODES = 2
START_S, STOP_S = 30.0, 10.0
_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
NodeName=node[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs=4
PartitionName=tests Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=FORCE:8 State=UP
"""


def missing() -> str:
    """Return why there can be no cluster here; empty: there can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if absent:
        return f"{', '.join(absent)} not installed (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


@contextlib.contextmanager
def slurm() -> Iterator[dict[str, str]]:
    """Start the daemons; give the variables for commands that use them.

    Raises
    ------
    RuntimeError
        They do not start here; says what they wrote.
    """
    with tempfile.TemporaryDirectory(prefix="gct-slurm-") as name:
        folder = Path(name)
        environment = _configured(folder)
        daemons: list[subprocess.Popen[bytes]] = []
        try:
            for command in _commands(folder):
                with open(folder / "daemons.log", "ab") as log:
                    daemons.append(
                        subprocess.Popen(command, env=environment, stdout=log, stderr=log)
                    )
                if command[0] == "munged":
                    _until(folder, daemons, (folder / "munge.socket").exists)
            _until(folder, daemons, lambda: _idle_nodes(environment) == NODES)
            yield environment
        finally:
            for daemon in reversed(daemons):
                _stop(daemon)


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _configured(folder: Path) -> dict[str, str]:
    """Write what the daemons read; return the variables by which they find it."""
    controller = _free_ports(NODES + 1)
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    configuration = folder / "slurm.conf"
    configuration.write_text(
        _CONFIGURATION.format(
            host=socket.gethostname(),
            folder=folder,
            controller=controller,
            nodes=NODES,
            ports=f"{controller + 1}-{controller + NODES}",
        )
    )
    return {**os.environ, "PATH": _path(), "SLURM_CONF": str(configuration)}


def _free_ports(count: int) -> int:
    """Return the first of so many ports in a row that are free now."""
    for first in range(20000, 30000, count):
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise RuntimeError("no ports are free")


def _commands(folder: Path) -> list[list[str]]:
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid"}
    files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
    munge = [f"--{option}={folder / name}" for option, name in files.items()]
    return [
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", f"node{number + 1}"] for number in range(NODES)),
    ]


def _idle_nodes(environment: dict[str, str]) -> int:
    command = ["sinfo", "--noheader", "--Node", "--format=%T"]
    said = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=START_S, check=False
    )
    return said.stdout.split().count("idle")


def _until(
    folder: Path, daemons: list[subprocess.Popen[bytes]], condition: Callable[[], bool]
) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        ended = [str(daemon.args) for daemon in daemons if daemon.poll() is not None]
        if ended or time.monotonic() > deadline:
            text = "".join(log.read_text(errors="replace")[-1500:] for log in folder.glob("*.log"))
            raise RuntimeError(f"Slurm does not start here ({', '.join(ended) or 'late'}): {text}")
        time.sleep(0.05)


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(STOP_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
