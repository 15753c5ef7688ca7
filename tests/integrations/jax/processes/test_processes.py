"""JAX's collectives between processes over gpucoll."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.hosts import SECRET

pytest.importorskip("jax", minversion="0.5")

BEGIN = """
import os, signal, sys, time
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("i",))
ones = np.ones(4 * jax.device_count(), np.float32)
x = jax.make_array_from_callback(ones.shape, NamedSharding(mesh, P("i")), ones.__getitem__)
spread = {"mesh": mesh, "in_specs": P("i"), "out_specs": P()}
total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "i"), **spread))
rank = jax.process_index()
total(x).block_until_ready()
"""

FEW = ("float32", "int8")


@pytest.mark.parametrize(("n_ranks", "n_devices"), [(2, 1), (2, 2)])
def test_every_value(run_program, n_ranks, n_devices):
    """All collectives; with several devices, threads call at once."""
    devices = f"--xla_force_host_platform_device_count={n_devices}"
    total = n_ranks * n_devices
    done = run_program(
        "every_collective.py", n_ranks, total, *FEW, environment={"XLA_FLAGS": devices}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all as it should be") == n_ranks


def test_two_hosts(run_program):
    """They share no memory; a communicator of some processes meets through JAX's own store."""
    place = ("--nodes", 2, "--meet", "127.0.0.1:29733")

    def on_host(node: int) -> subprocess.CompletedProcess[str]:
        variables = {
            "GPUCOLL_HOST_ID": f"host {node}",
            "GPUCOLL_SECRET": SECRET,
            "GPUCOLL_INTERFACES": "lo",
        }
        return run_program(
            "every_collective.py",
            2,
            4,
            *FEW,
            environment=variables,
            options=(*place, "--node-rank", node),
        )

    with ThreadPoolExecutor() as hosts:
        for done in hosts.map(on_host, range(2)):
            assert done.returncode == 0, done.stdout + done.stderr
            assert done.stdout.count("all as it should be") == 2


def test_a_killed_process_is_named(run_program):
    """The others get gpucoll's error in JAX's, at once, and end soon."""
    program = f"""{BEGIN}
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
start = time.perf_counter()
try:
    total(x).block_until_ready()
except Exception as error:
    assert "lost rank 1" in str(error), error
    print(f"told after {{time.perf_counter() - start:.3f}} s")
"""
    start = time.monotonic()
    done = run_program(program, 3, options=("--grace", 20))
    assert done.stdout.count("told after 0.") == 2, done.stdout + done.stderr
    assert "rank 1 of 3 was killed by SIGKILL" in done.stderr
    assert time.monotonic() - start < 20


def test_an_end_without_waiting(run_program):
    """What was started is completed before a process ends, because others wait for it."""
    begin = BEGIN.replace("total(x).block_until_ready()", "")  # not even the first call
    program = f"{begin}\ny = total(x)\nif rank: print(np.asarray(y)[0])\nelse: del y"
    done = run_program(program, 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2.0"]


def test_an_error_of_one_process(run_program):
    """It is the cause that the launcher names; nobody hangs or crashes."""
    program = f"""{BEGIN}
if rank == 1:
    raise ValueError("rank 1 gives up")
try:
    total(x).block_until_ready()
except Exception as error:
    print("PeerLostError" in str(error))
"""
    done = run_program(program, 3, options=("--grace", 20))
    assert done.stdout.split() == ["True", "True"], done.stderr
    assert "rank 1 gives up" in done.stderr
    assert "SIG" not in done.stderr


def test_an_interrupt(tmp_path):
    """Ctrl-C in a collective that waits ends all ranks."""
    path = tmp_path / "program.py"
    path.write_text(
        f"{BEGIN}\nprint('waits', flush=True)\nif rank:\n    time.sleep(60)\n"
        "try:\n    total(x).block_until_ready()\nexcept Exception as error:\n"
        "    print(error)\ntime.sleep(30)",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "gpucoll", "run", "--no-prefix", "-n", "2", str(path)]
    variables = {**os.environ, "GPUCOLL_JAX": "1", "JAX_PLATFORMS": "cpu"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=variables, text=True, stdout=pipe, stderr=pipe) as running:
        assert running.stdout is not None
        for _ in range(2):
            assert running.stdout.readline() == "waits\n"
        time.sleep(0.3)
        running.send_signal(signal.SIGINT)
        start = time.monotonic()
        _, errors = running.communicate(timeout=30)
    assert time.monotonic() - start < 15
    assert "KeyboardInterrupt" in errors


def test_initialise_again(run_program):
    """A program's own call is answered; one for other processes is an error."""
    program = """
import jax
assert jax.distributed.is_initialized()
jax.distributed.initialize("localhost:1234", num_processes=2, process_id=jax.process_index())
for wrong in ({"num_processes": 3}, {"process_id": 1 - jax.process_index()}):
    try:
        jax.distributed.initialize(**wrong)
    except ValueError as error:
        print(error)
"""
    done = run_program(program, 2)
    assert done.returncode == 0, done.stderr
    text = "but gpucoll has started this process as rank 0 of 2: omit num_processes"
    assert text in done.stdout


def test_what_a_program_sets_before_its_import_counts(run_program):
    program = """
import os
os.environ["JAX_ENABLE_X64"] = "1"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
import jax
print(jax.config.jax_enable_x64, jax.device_count(), jax.__spec__.loader.__class__.__name__)
"""
    done = run_program(program, 2)
    assert done.stdout.split("\n")[:2] == ["True 6 SourceFileLoader"] * 2, done.stderr


def test_after_the_import_of_jax_is_too_late():
    program = (
        "import jax; from gpucoll.integrations.jax import use_for_processes; use_for_processes()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert "StateError: JAX is imported already" in done.stderr
    assert "GPUCOLL_JAX=1" in done.stderr
