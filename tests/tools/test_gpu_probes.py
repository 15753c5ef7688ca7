"""The programs that tools/gpu_check.py runs on a GPU, here over the CPU and over doubles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpucoll import config

TOOLS = Path(__file__).resolve().parents[2] / "tools"

BREAKS = """
import sys
sys.path.insert(0, {tools!r})
import gpu_collectives
from gpucoll.errors import ArgumentTypeError

def breaks(comm, kit):
    if comm.rank == 1:
        raise AssertionError("off by 3")
    comm.barrier()

def refused(comm, kit):
    raise ArgumentTypeError("no such dtype")

def checks(world_size):
    yield "before", gpu_collectives.ring
    yield "breaks", breaks
    yield "refused", refused
    yield "after", gpu_collectives.ring

gpu_collectives.checks = checks
gpu_collectives.CALL_S = 3.0
sys.exit(gpu_collectives.main(["--backend", "cpu", "--array", "numpy", "--output", {output!r}]))
"""


def run(command, timeout_s=120.0, **environment):
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return done.returncode, done.stdout + done.stderr


def rows_of(path):
    return {row["name"]: row for row in json.loads(path.read_text())}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("ranks", "how"), [(1, ["--backend", "cpu"]), (2, ["--backend", "cpu"]), (2, ["--mixed"])]
)
def test_every_call_is_compared_with_the_oracle(tmp_path, ranks, how):
    output = tmp_path / "rows.json"
    command = ["-m", "gpucoll.launcher.cli", "-n", str(ranks), str(TOOLS / "gpu_collectives.py")]
    command += [*how, "--array", "numpy", "--output", str(output)]
    code, text = run([*command, "--only", "r"])
    assert code == 0, text
    rows = rows_of(output)
    left_out = [name for name, row in rows.items() if row["status"] != "passed"]
    expected = set() if "--mixed" in how else {"captured and replayed"}
    assert {name.partition(":")[0] for name in left_out} == expected
    assert {row["ranks"] for row in rows.values()} == {ranks}
    for name in ("scatter float16 1000 in place", "send_recv in a ring", "reduce plan"):
        assert rows[name]["on_ranks"] == list(range(ranks))
    assert rows["time of all_reduce float32 4096"]["time_s"] > 0


@pytest.mark.parametrize("way", ["1", "2", "2 staged", "3 ring"])
def test_every_call_through_direct_on_host_devices(tmp_path, way):
    ranks, _, how = way.partition(" ")
    output = tmp_path / "rows.json"
    command = ["-m", "gpucoll.launcher.cli", "-n", ranks, str(TOOLS / "gpu_collectives.py")]
    command += ["--backend", "direct", "--array", "host-device", "--output", str(output)]
    code, text = run([*command, *([f"--{how}"] if how else [])], 240)
    assert code == 0, text
    assert ("2 ranks: at most 0 read each other's GPU memory" in text) == (how == "staged")
    assert ("ring of ranks 0, 1, 2: asked for" in text) == (how == "ring")
    rows = rows_of(output)
    left_out = [name for name, row in rows.items() if row["status"] != "passed"]
    assert {name.partition(":")[0] for name in left_out} == {"captured and replayed"}
    for name in ("compressed all_reduce, int8_block, residual", "reduce_scatter bxor int64"):
        assert rows[name]["status"] == "passed"
    for name in ("the user's own operation", "all_reduce sum float8_e4m3fn", "a list of 50 arrays"):
        assert rows[name]["status"] == "passed"


def test_every_reduction_between_played_hosts(tmp_path):
    output = tmp_path / "rows.json"
    command = ["-m", "gpucoll.launcher.cli", "-n", "2", str(TOOLS / "gpu_collectives.py")]
    command += ["--hosts", "--only", "reduce", "--array", "host-device", "--output", str(output)]
    code, text = run(command, 240)
    assert code == 0, text
    assert "GPU path between hosts" in text
    assert {row["status"] for row in rows_of(output).values()} == {"passed", "left out"}


def test_a_call_that_fails_hides_no_other(tmp_path):
    program, output = tmp_path / "program.py", tmp_path / "rows.json"
    program.write_text(BREAKS.format(tools=str(TOOLS), output=str(output)))
    code, text = run(["-m", "gpucoll.launcher.cli", "-n", "2", str(program)])
    assert code == 1, text
    rows = rows_of(output)
    assert [row["status"] for row in rows.values()] == ["passed", "failed", "refused", "passed"]
    assert "failed: breaks: " in text
    assert rows["refused"]["detail"] == "no such dtype"


LOOK_ALIKE = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.calls.gpu import cupy_double
from tests.doubles import Double
cupy_double.install("cuda")
control = Double("nccl", Path({library!r}), Path({driver!r})).load()

def begin_capture(stream):
    stream.capture = control.captured(stream.ptr)
    stream.graph = stream.capture.__enter__()

def end_capture(stream):
    stream.capture.__exit__(None, None, None)
    assert stream.graph.code == 0
    return stream.graph

cupy_double.Stream.begin_capture, cupy_double.Stream.end_capture = begin_capture, end_capture
"""


@pytest.fixture
def look_alike(doubles, tmp_path):
    """The environment in which ``import cupy`` finds a look-alike over the doubles."""
    made = doubles.double("nccl")
    (tmp_path / "path").mkdir()
    paths = {"root": str(TOOLS.parent), "library": str(made.library), "driver": str(made.driver)}
    (tmp_path / "path" / "cupy.py").write_text(LOOK_ALIKE.format(**paths))
    before = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join([str(tmp_path / "path"), *before])
    return {**made.variables, **made.search_path, config.GPU_KIND: "cuda", "PYTHONPATH": path}


@pytest.mark.parametrize("way", ["nccl 1", "direct 2"])
def test_every_call_over_doubles(look_alike, tmp_path, way):
    backend, _, ranks = way.partition(" ")
    output = tmp_path / "rows.json"
    command = ["-m", "gpucoll.launcher.cli", "-n", ranks, str(TOOLS / "gpu_collectives.py")]
    code, text = run([*command, "--backend", backend, "--output", str(output)], 240, **look_alike)
    assert code == 0, text
    rows = rows_of(output)
    found = {name: row["status"] for name, row in rows.items() if row["status"] != "passed"}
    found.pop("the user's own operation", None)  # needs numba-cuda
    captures = {name for name in rows if name.startswith("captured and replayed")}
    assert len(captures) == 4
    assert found == ({} if backend == "nccl" else dict.fromkeys(captures, "refused"))
    assert rows["all_reduce sum float8_e4m3fn"]["ranks"] == int(ranks)


def test_probes_of_nccl(look_alike, tmp_path):
    output = tmp_path / "rows.json"
    command = [str(TOOLS / "gpu_nccl_probes.py"), "--without-torch", "--output", str(output)]
    code, text = run(command, **look_alike)
    assert code == 0, text
    rows = rows_of(output)
    assert {row["status"] for row in rows.values()} == {"passed"}
    for number in range(2):
        assert rows[f"a call with blocking {number}"]["send_recv_us"] > 0
    assert rows["send_recv of 4096 bytes"]["time_s"] > 0


HOST_DEVICE = {
    "gpu_arrays.py": (2, ["--kinds", "host-device"], "host-device: movements"),
    "gpu_direct_sweep.py": (3, ["--array", "host-device", "--most", "0"], "64 KiB, by shares"),
    "gpu_killed.py": (0, ["--array", "host-device"], "a rank is killed in calls of 64 MiB"),
}


@pytest.mark.parametrize("program", HOST_DEVICE)
def test_further_programs_on_host_devices(tmp_path, program):
    ranks, more, expected = HOST_DEVICE[program]
    output = tmp_path / "rows.json"
    launched = ["-m", "gpucoll.launcher.cli", "-n", str(ranks)] if ranks else []
    code, text = run([*launched, str(TOOLS / program), *more, "--output", str(output)])
    assert code == 0, text
    rows = rows_of(output)
    assert {row["status"] for row in rows.values()} == {"passed"}
    assert expected in rows


def test_torch_on_the_cpu(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    output = tmp_path / "rows.json"
    command = ["-m", "gpucoll.launcher.cli", "-n", "2", str(TOOLS / "gpu_torch.py")]
    code, text = run([*command, "--device", "cpu", "--output", str(output)])
    assert code == 0, text
    rows = rows_of(output)
    found = {name: row["status"] for name, row in rows.items() if row["status"] != "passed"}
    assert found == {"a captured graph": "left out"}
    assert len(rows) == 9
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


@pytest.fixture(params=["nccl", "rccl"])
def double(request, doubles):
    made = doubles.double(request.param)
    kind = {"nccl": "cuda", "rccl": "rocm"}[request.param]
    return {**made.variables, **made.search_path, config.GPU_KIND: kind}


@pytest.mark.parametrize("probe", ["copies", "words", "exported"])
def test_probes_of_memory(double, tmp_path, probe):
    output = tmp_path / "rows.json"
    command = [str(TOOLS / "gpu_memory_probes.py"), "--probe", probe, "--output", str(output)]
    code, text = run([*command, "--most", str(1 << 20)], **double)
    assert code == 0, text
    rows = rows_of(output)
    assert {row["status"] for row in rows.values()} == {"passed"}
    wanted = {
        "copies": "GPU to pinned, 1024 KiB",
        "words": "a stream waits for another stream's word",
        "exported": "another process reads and writes exported memory",
    }
    assert wanted[probe] in rows


@pytest.mark.parametrize("double", ["nccl"], indirect=True)
def test_streams_that_share_a_queue_stand_still(double, tmp_path):
    output = tmp_path / "rows.json"
    command = [str(TOOLS / "gpu_stream_probes.py"), "--probe", "queues", "--most", "5"]
    command += ["--connections", "4", "--output", str(output)]
    code, text = run(command, DOUBLE_WORK_QUEUES="4", **double)
    assert code == 0, text
    assert {row["status"] for row in json.loads(output.read_text())} == {"passed"}
    row = rows_of(output)["ordinary streams wait, urgent ones go on"]
    # The oldest one is in queue 1, those that wait in 2, 3, 4, 1, 2, the newest one in 3.
    assert row["stalls"] == {"newest": [2, 3, 4, 5], "oldest": [4, 5]}


@pytest.mark.parametrize("double", ["rccl"], indirect=True)
def test_processes_take_turns(double, tmp_path):
    output = tmp_path / "rows.json"
    command = [str(TOOLS / "gpu_stream_probes.py"), "--probe", "turns", "--most", "20"]
    command += ["--busy", str(1 << 16)]
    code, text = run([*command, "--output", str(output)], **double)
    assert code == 0, text
    assert len(rows_of(output)) == 4
    assert all(row["round_s"] > 0 for row in rows_of(output).values())


def test_no_gpu(tmp_path):
    command = [str(TOOLS / "gpu_memory_probes.py"), "--probe", "words"]
    command += ["--output", str(tmp_path / "rows.json")]
    code, text = run(command, **{config.CPU_ONLY: "1"})
    assert (code, text) == (2, "no GPU is seen here\n")
