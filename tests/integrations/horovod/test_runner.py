"""The command horovodrun and horovod.run: flags, hosts, elastic jobs."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpucoll import LaunchError
from gpucoll.integrations import horovod
from gpucoll.integrations.horovod.runner.discovery import Discovery
from gpucoll.integrations.horovod.runner.flags import parse_args, set_env_from_args
from gpucoll.integrations.horovod.runner.hosts import hosts_in_file, is_local, parsed_hosts
from gpucoll.integrations.horovod.runner.ranks import Slot, assigned, places, with_door

TRAINING = Path(__file__).with_name("programs") / "elastic_training.py"
SHOWS_ITS_PLACE = """
import os, sys
from horovod.common import basics as hvd
hvd.init()
names = ("RANK", "SIZE", "LOCAL_RANK", "CROSS_SIZE", "HOSTNAME", "CYCLE_TIME")
print(hvd.rank(), *(os.environ.get(f"HOROVOD_{name}") for name in names), *sys.argv[1:])
hvd.shutdown()
"""


def horovodrun(*arguments: str, pause_s: float = 0.0, **environment: str):
    """Run the command."""
    command = [sys.executable, "-m", "gpucoll.integrations.horovod.runner.launch", *arguments]
    variables = {**os.environ, **environment, "PAUSE_S": str(pause_s)}
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=60, check=False
    )


class TestFlags:
    def test_what_they_set(self):
        flags = "-np 2 --fusion-threshold-mb 2 --cycle-time-ms 2.5 --no-stall-check --gloo"
        flags += " --timeline-filename /tmp/t --no-timeline-mark-cycles --network-interfaces eth0"
        args = parse_args([*flags.split(), "python", "train.py", "--np", "7"])
        assert args.command == ["python", "train.py", "--np", "7"]
        assert set_env_from_args({}, args) == {
            "HOROVOD_FUSION_THRESHOLD": str(2 << 20),
            "HOROVOD_CYCLE_TIME": "2.5",
            "HOROVOD_STALL_CHECK_DISABLE": "1",
            "HOROVOD_TIMELINE": "/tmp/t",
            "HOROVOD_TIMELINE_MARK_CYCLES": "0",
            "GPUCOLL_INTERFACES": "eth0",
        }

    def test_of_horovods_elastic_jobs(self):
        flags = "-np 2 --min-np 1 --max-num-proc 4 --host-discovery-script ./d.sh --reset-limit 3"
        flags += " --slots-per-host 2 --elastic-timeout 9 --blacklist-cooldown-range 1 5 x"
        args = parse_args(flags.split())
        assert (args.min_num_proc, args.max_num_proc, args.slots) == (1, 4, 2)
        assert args.cooldown_range == [1, 5]
        assert set_env_from_args({}, args) == {"HOROVOD_ELASTIC_TIMEOUT": "9"}

    @pytest.mark.parametrize(
        "flags",
        ["", "-np 0 x", "-np 2", "-np 2 --cycle-time-ms -1 x", "-np 1 -H a:1 -hostfile b x"],
    )
    def test_wrong_ones(self, flags, capsys):
        with pytest.raises(SystemExit) as ended:
            parse_args(flags.split())
        assert ended.value.code == 2
        assert "error: " in capsys.readouterr().err

    def test_a_file_of_them(self, tmp_path):
        pytest.importorskip("yaml")
        file = tmp_path / "config.yaml"
        file.write_text(
            "params:\n  cycle_time_ms: 10\n  cache_capacity: 5\ntimeline:\n  filename: /tmp/t\n"
            "stall_check:\n  enabled: false\nlogging:\n  level: INFO\n"
        )
        args = parse_args(["-np", "1", "--config-file", str(file), "--cycle-time-ms", "3", "x"])
        assert (args.cycle_time_ms, args.cache_capacity) == (3.0, 5)
        assert (args.timeline_filename, args.no_stall_check, args.log_level) == (
            "/tmp/t",
            True,
            "INFO",
        )

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            (None, "cannot be read"),
            ("params: [", "cannot be read"),
            ("params: 5", "sections with options are expected"),
            ("params:\n  cycle_time_ms: soon\n", "cycle-time-ms must be of type float; got 'soon'"),
        ],
    )
    def test_a_wrong_file(self, tmp_path, capsys, text, told):
        pytest.importorskip("yaml")
        file = tmp_path / "config.yaml"
        if text is not None:
            file.write_text(text)
        with pytest.raises(SystemExit):
            parse_args(["-np", "1", "--config-file", str(file), "x"])
        assert told in capsys.readouterr().err


class TestHosts:
    def test_their_forms(self, tmp_path):
        assert parsed_hosts("a.b-c:2, d:4") == {"a.b-c": 2, "d": 4}
        with pytest.raises(ValueError, match="Invalid host input"):
            parsed_hosts("a,b:2")
        file = tmp_path / "hosts"
        file.write_text("a slots=2  # fast\n\nb slots=1 max_slots=3\n")
        assert hosts_in_file(str(file)) == {"a": 2, "b": 1}
        file.write_text("a 2\n")
        with pytest.raises(ValueError, match="HOST slots=N; got 'a 2'"):
            hosts_in_file(str(file))

    def test_which_is_this_one(self):
        assert is_local("localhost")
        assert is_local("127.0.0.1")
        assert is_local(os.uname().nodename)
        assert not is_local("no-such-host.invalid")
        assert not is_local("192.0.2.1")

    def test_places(self):
        slots = assigned({"a": 2, "b": 1})
        assert slots == [Slot("a", 0), Slot("a", 1), Slot("b", 0)]
        assert len(assigned({"a": 2, "b": 4}, 3)) == 3
        found = [
            (p.rank, p.local_rank, p.local_size, p.cross_rank, p.cross_size) for p in places(slots)
        ]
        assert found == [(0, 0, 2, 0, 2), (1, 1, 2, 0, 1), (2, 0, 1, 1, 2)]


def test_programs_find_horovod():
    door = ["-m", "gpucoll.integrations.horovod"]
    assert with_door(["python", "-u", "x.py", "-m"]) == ["python", "-u", *door, "x.py", "-m"]
    assert with_door(["/usr/bin/python3.11", "-X", "dev", "-m", "x"]) == [
        *("/usr/bin/python3.11", "-X", "dev"),
        *door,
        *("-m", "x"),
    ]
    for other in (["./train.sh", "x.py"], ["python"], ["python", *door, "x.py"]):
        assert with_door(other) == other


class TestDiscovery:
    def test_what_a_script_prints(self, tmp_path):
        assert Discovery("echo a:2; echo; echo b", slots=3).find() == {"a": 2, "b": 3}
        with pytest.raises(LaunchError, match=r"discovery script: exit 3\. Exit code: 3"):
            Discovery("exit 3").find()
        with pytest.raises(LaunchError, match="'a:many', which is not HOST:SLOTS"):
            Discovery("echo a:many").find()

    def test_too_few_slots(self):
        with pytest.raises(LaunchError, match="2 ranks are to be started"):
            Discovery("echo a:1").wait_for(2, 0.05, 0.01)
        with pytest.raises(LaunchError, match="2 ranks are to be started"):
            Discovery(None, hosts={"a": 1}).wait_for(2, 60.0, 0.01)


@pytest.mark.soak
def test_static_ranks(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SHOWS_ITS_PLACE)
    out = tmp_path / "out"
    flags = ["-np", "2", "-H", "localhost:1,127.0.0.1:4", "--cycle-time-ms", "2"]
    done = horovodrun(*flags, "--output-filename", str(out), sys.executable, str(program), "-x")
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == ["[0] 0 0 2 0 1 localhost 2.0 -x", "[1] 1 1 2 1 1 127.0.0.1 2.0 -x"]
    assert (out / "rank.1" / "stdout").read_text() == f"{lines[1][4:]}\n"


@pytest.mark.soak
def test_what_cannot_be_started(tmp_path):
    done = horovodrun("-np", "3", "-H", "localhost:2", "true")
    assert done.returncode == 2
    assert "Requested more processes (3) than there are available slots (2)" in done.stderr
    done = horovodrun("-np", "1", "--log-level", "INFO", "no-such-program")
    assert "no such program: no-such-program" in done.stderr
    assert horovodrun("-np", "1", "sh", "-c", "exit 5").returncode == 5
    assert "[X] Gloo" in horovodrun("--check-build").stdout


@pytest.mark.soak
def test_hosts_without_ssh(tmp_path):
    """The command to type on each host is shown."""
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexit 255\n")
    ssh.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = horovodrun("-np", "3", "-H", "localhost:1,far.invalid:2", "python", "x.py", PATH=path)
    assert done.returncode == 2
    assert "could not connect to some hosts via ssh: far.invalid" in done.stderr
    assert "-n 1,2 --node-rank 1 python -m gpucoll.integrations.horovod x.py" in done.stderr


@pytest.mark.soak
def test_hosts_with_ssh(tmp_path):
    """An ssh that runs the command here, as another host."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        '#!/bin/sh\nwhile [ "$1" = -o ]; do shift 2; done\n'
        'GPUCOLL_HOST_ID=$1 exec /bin/sh -c "$2"\n'
    )
    ssh.chmod(0o755)
    program = tmp_path / "program.py"
    program.write_text(SHOWS_ITS_PLACE)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = horovodrun(
        *("-np", "3", "-H", "localhost:1,far.invalid:2", sys.executable, str(program)), PATH=path
    )
    assert done.returncode == 0, done.stderr
    assert sorted(line.partition(" ")[2] for line in done.stdout.splitlines()) == [
        "0 0 3 0 2 localhost None",
        "1 1 3 0 2 far.invalid None",
        "2 2 3 1 1 far.invalid None",
    ]


class TestElastic:
    @staticmethod
    def result_of(done):
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1].partition(" ")[2])

    @pytest.mark.soak
    def test_a_failed_host_is_left_out(self):
        """Its other rank leaves, and ranks 2 and 3 go on, though neither is the lowest."""
        flags = ["-np", "4", "--min-np", "2", "-H", "localhost:2,127.0.0.1:2", sys.executable]
        done = horovodrun(*flags, str(TRAINING), "150", "0:5", pause_s=0.01)
        assert "localhost is left out" in done.stderr
        result = self.result_of(done)
        assert result["right"]
        assert result["sizes"][0] == [4, 5]
        assert result["sizes"][-1][0] == 2

    @pytest.mark.soak
    def test_the_only_host_is_not(self):
        done = horovodrun(
            *("-np", "3", "--min-np", "2", sys.executable, str(TRAINING), "500", "0:5"),
            pause_s=0.015,
        )
        result = self.result_of(done)
        assert result["right"]
        assert [size for size, _ in result["sizes"]] == [3, 2, 3]

    @pytest.mark.soak
    def test_a_failed_host_comes_back(self):
        flags = "-np 4 --min-np 2 -H localhost:2,127.0.0.1:2 --blacklist-cooldown-range 1 2"
        done = horovodrun(*flags.split(), sys.executable, str(TRAINING), "500", "3:5", pause_s=0.02)
        result = self.result_of(done)
        assert result["right"]
        assert result["sizes"][-1][0] == 4

    @pytest.mark.soak
    def test_a_script_adds_and_removes_hosts(self, tmp_path):
        """All ranks of the beginning leave; the state goes on with those that came."""
        hosts = tmp_path / "hosts"
        hosts.write_text("localhost:2\n")
        flags = ["-np", "2", "--min-np", "2", "--max-np", "4"]
        flags += ["--host-discovery-script", f"cat {hosts}", sys.executable, str(TRAINING), "300"]
        command = [sys.executable, "-m", "gpucoll.integrations.horovod.runner.launch", *flags]
        with subprocess.Popen(
            command,
            env={**os.environ, "PAUSE_S": "0.03"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as job:
            time.sleep(3.0)
            hosts.write_text("localhost:2\n127.0.0.1:2\n")
            time.sleep(3.0)
            hosts.write_text("127.0.0.1:2\n")
            printed, said = job.communicate(timeout=50)
        assert job.returncode == 0, said
        result = json.loads(printed.splitlines()[-1].partition(" ")[2])
        assert result["right"]
        assert [size for size, _ in result["sizes"]] == [2, 4, 2]

    @pytest.mark.soak
    def test_the_user_ends_it(self, tmp_path):
        """Nothing is left: no rank, no script, no folder of news."""
        flags = [
            "-np",
            "2",
            "--min-np",
            "2",
            "--host-discovery-script",
            "echo localhost:2; sleep 1",
        ]
        command = [sys.executable, "-m", "gpucoll.integrations.horovod.runner.launch", *flags]
        with subprocess.Popen(
            [*command, sys.executable, str(TRAINING), "1000000"],
            env={**os.environ, "TMPDIR": str(tmp_path), "PAUSE_S": "0.01"},
            stdout=subprocess.PIPE,
            text=True,
        ) as job:
            assert job.stdout is not None
            lines = [job.stdout.readline() for _ in range(2)]
            assert [*tmp_path.iterdir()]
            job.terminate()
            job.communicate(timeout=30)
        assert job.returncode == 128 + signal.SIGTERM
        assert not [*tmp_path.iterdir()]
        for process in (int(line.split()[2]) for line in lines):
            with pytest.raises(ProcessLookupError):
                os.kill(process, 0)

    @pytest.mark.soak
    def test_limits(self):
        flags = ["-np", "4", "--min-np", "2", "-H", "localhost:2,127.0.0.1:2", "--reset-limit", "0"]
        done = horovodrun(*flags, sys.executable, str(TRAINING), "200", "0:5", pause_s=0.01)
        assert done.returncode != 0
        assert "number of resets during elastic job exceeded limit: 0" in done.stderr
        flags = ["-np", "2", "--min-np", "2", "-H", "localhost:1,far.invalid:1", "true"]
        assert "elastic ranks on other hosts (far.invalid)" in horovodrun(*flags).stderr


@pytest.mark.soak
def test_run():
    def function(x, *, y):
        hvd = importlib.import_module("horovod.common.basics")

        hvd.init()
        return hvd.rank(), hvd.size(), x + y

    assert horovod.run(function, (1,), {"y": 2}, num_proc=2) == [(0, 2, 3), (1, 2, 3)]


def test_what_run_refuses():
    for given, text in (
        ({"min_num_proc": 2}, "started by horovodrun"),
        ({"hosts": "far.invalid:2"}, "started by horovodrun -H"),
        ({"hosts": "a:1", "hostfile": "b"}, "only allow one provided"),
        ({"use_gloo": True, "use_mpi": True}, "only allow one set True"),
    ):
        with pytest.raises(ValueError, match=text):
            horovod.run(print, **given)
    with pytest.raises(TypeError, match="unexpected keyword argument 'ranks'"):
        horovod.run(print, ranks=2)
