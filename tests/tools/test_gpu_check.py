"""The check for a GPU, on machines without one: what it does with steps, faults and results."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import gpu_check  # noqa: E402
from gpu_check import Step, check  # noqa: E402
from gpu_check_table import lines_of_direct  # noqa: E402

sys.path.remove(str(ROOT / "tools"))

KEYS = {"schema", "date", "status", "environment", "steps", "benchmarks", "host_cost", "doctor"}
KEYS |= {"bench", "bench_torch", "bench_list", "bench_direct", "memory", "collectives"}
ENVIRONMENT = """
import json, sys
found = {"device": {"name": "Imaginary"}, "driver_version": 13000, "missing": {"ml_dtypes": "no"}}
json.dump(found, open(sys.argv[1], "w"))
"""
ROW = {
    "name": "reduce",
    "moved_bytes": 3000,
    "time_s": 1e-6,
    "against_s": 0.95e-6,
    "rate": 3e9,
    "against_rate": 3.2e9,
    "ratio": 0.95,
    "target": 0.9,
    "against": "copy",
    "times_s": [1e-6],
    "against_times_s": [0.95e-6],
}


def python(name: str, program: str, limit_s: float = 60, **options) -> Step:
    return Step(name, [sys.executable, "-c", program], limit_s, **options)


def report_in(folder: Path) -> dict:
    report = json.loads((folder / "gpu_check.json").read_text())
    assert set(report) == KEYS
    assert report["schema"] == gpu_check.SCHEMA
    return report


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_without_a_gpu(tmp_path):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "tools/gpu_check.py"), "--output", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == gpu_check.NO_GPU, done.stdout + done.stderr
    assert done.stdout.startswith("no GPU: ")
    report = report_in(tmp_path)
    assert report["status"] == "no GPU"
    assert report["environment"]["versions"]["numpy"]
    assert [step["name"] for step in report["steps"]] == ["environment"]
    assert not report["benchmarks"]


def test_everything_passes(tmp_path, capsys):
    program = f"import json; json.dump([{ROW!r}], open({str(tmp_path / 'rows.json')!r}, 'w'))"
    told = f"""print('{{"cpus": 2}}', file=open({str(tmp_path / "doctor.json")!r}, "w"))"""
    steps = [
        python("tests", "print('12 passed')"),
        python("benchmark reduce", program, result="rows.json"),
        python("doctor", told, result="doctor.json", key="doctor"),
    ]
    assert check(tmp_path, lambda folder: steps, 100, ENVIRONMENT) == gpu_check.OK
    report = report_in(tmp_path)
    assert report["status"] == "passed"
    assert [step["status"] for step in report["steps"]] == ["passed"] * 4
    assert report["doctor"] == {"cpus": 2}
    assert report["steps"][1]["detail"] == "12 passed"
    assert report["benchmarks"] == [ROW]
    text = capsys.readouterr().out
    assert "Imaginary, driver 13000" in text
    assert "0.95 x copy  wanted 0.9\n" in text
    assert text.rstrip().endswith("passed; every number is in gpu_check.json")


SANITIZED = "print('4 passed in 1.00s'); print('========= ERROR SUMMARY: 0 errors')"

HANGS = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open({rows!r}, "w") as file:
    file.write("[{{")
with open({pids!r}, "w") as file:
    file.write(str(child.pid))
print("about to hang", flush=True)
time.sleep(600)
"""


def test_faults_end_nothing_but_themselves(tmp_path, capsys):
    pids = tmp_path / "pid"
    program = HANGS.format(rows=str(tmp_path / "rows.json"), pids=str(pids))
    steps = [
        python("fails", "import sys; print('broken'); sys.exit(3)"),
        python("dies", "import os; os.abort()"),
        python("hangs", program, limit_s=5, result="rows.json"),
        Step("needs ml_dtypes", [sys.executable, "-m", "pytest"], 60),
        python("comes last", "print('still here')"),
    ]
    assert check(tmp_path, lambda folder: steps, 100, ENVIRONMENT) == gpu_check.FAILED
    report = report_in(tmp_path)
    assert report["status"] == "failed"
    found = {step["name"]: (step["status"], step["detail"]) for step in report["steps"]}
    assert found["fails"] == ("failed", "broken")
    assert found["dies"][0] == "failed"
    assert found["hangs"] == ("killed", "about to hang")
    assert found["needs ml_dtypes"] == ("not run", "ml_dtypes does not work here: no")
    assert found["comes last"] == ("passed", "still here")
    assert not report["benchmarks"]
    assert not is_running(int(pids.read_text()))
    assert "failed; every number" in capsys.readouterr().out


def test_tests_that_are_all_skipped_check_nothing(tmp_path):
    file = tmp_path / "test_nothing.py"
    file.write_text("import pytest\ndef test(): pytest.skip('no GPU')\n")
    pytest_of = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    sanitized = [sys.executable, "-c", SANITIZED, "pytest"]
    steps = [Step("tests", pytest_of, 60), Step("two ranks", pytest_of, 60, may_skip=True)]
    steps.append(Step("compute-sanitizer", sanitized, 60))
    environment = ENVIRONMENT.replace('"missing": {"ml_dtypes": "no"}', '"missing": {}')
    assert check(tmp_path, lambda folder: steps, 100, environment) == gpu_check.FAILED
    _, void, excused, sanitizer = report_in(tmp_path)["steps"]
    assert (void["status"], excused["status"]) == ("failed", "passed")
    assert sanitizer["status"] == "passed"
    assert "1 skipped" in void["detail"]


def test_a_backend_that_this_version_lacks_is_left_out(tmp_path, capsys):
    rows = [
        {"name": "scan", "ranks": 2, "status": "failed", "detail": "off by 1"},
        {"name": "time of x", "ranks": 2, "status": "passed", "detail": "", "time_s": 1e-3},
    ]
    found = [{"name": "GPU to pinned", "status": "passed", "detail": "", "rate": 25e9}]
    told = "import json; json.dump({!r}, open({!r}, 'w'))"
    path, other = (str(tmp_path / name) for name in ("rows.json", "memory.json"))
    steps = [
        python("of a later one", "print()", backend="direct"),
        python("of this one", told.format(rows, path), result="rows.json", key="collectives",
               backend="nccl"),
        python("memory", told.format(found, other), result="memory.json", key="memory"),
    ]  # fmt: skip
    environment = ENVIRONMENT.replace('"missing"', '"backends": ["cpu", "nccl"], "missing"')
    assert check(tmp_path, lambda folder: steps, 100, environment) == gpu_check.OK
    report = report_in(tmp_path)
    assert (report["collectives"], report["memory"]) == (rows, found)
    left_out = report["steps"][1]
    assert (left_out["status"], left_out["elapsed_s"]) == ("left out", 0)
    assert left_out["detail"] == "this version has no backend direct"
    out = capsys.readouterr().out
    assert "2 ranks: 1 calls failed" in out
    assert "failed: scan, 2 ranks: off by 1" in out
    assert "1000.0 us" in out
    assert "25.0 GB/s  passed" in out


def test_a_search_that_hangs_is_no_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "run_watched", lambda *a: ("killed", 90.0, "in the driver"))
    assert check(tmp_path) == gpu_check.NO_GPU
    assert "looking for one killed: in the driver" in capsys.readouterr().out


def test_no_step_begins_when_the_time_is_up(tmp_path):
    steps = [python("late", "print()")]
    assert check(tmp_path, lambda folder: steps, 0, ENVIRONMENT) == gpu_check.FAILED
    assert report_in(tmp_path)["steps"][1]["status"] == "not run"


def test_the_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/opt/{name}")
    steps = {step.name: step for step in gpu_check.steps_of(tmp_path)}
    first, *_, last = steps
    assert (first, last) == ("doctor", "compute-sanitizer")
    assert "gpu" in steps["tests of kernels"].command
    for name, place in (("benchmark pack", 1), ("memory exported", 1), ("collectives nccl 1", 5)):
        assert Path(steps[name].command[place]).is_file()
    assert {step.backend for step in steps.values()} == {"", "nccl", "direct"}
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "compute-sanitizer" not in [step.name for step in gpu_check.steps_of(tmp_path)]
    assert gpu_check.LIMIT_S < 8 * 60
    assert gpu_check.LEAST_S * len(steps) < gpu_check.LIMIT_S / 2
    ways = [name for name in steps if name.startswith("collectives direct")]
    assert ways == [f"collectives direct {way}" for way in ("2", "1", "4", "2 staged")]


def test_a_step_that_hangs_leaves_time_to_those_behind_it(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "LEAST_S", 3.0)
    steps = [python("hangs", "import time; time.sleep(60)"), python("comes last", "print('here')")]
    assert check(tmp_path, lambda folder: steps, 8, ENVIRONMENT) == gpu_check.FAILED
    _, hangs, last = report_in(tmp_path)["steps"]
    assert (hangs["status"], last["status"]) == ("killed", "passed")
    assert hangs["elapsed_s"] < 6


def test_two_ranks_are_compared_with_what_their_copies_allow():
    def side(size: int, time_us: float) -> dict:
        return {"alg_bw": size / time_us / 1e3, "bus_bw": 2 * size / time_us / 1e3}

    def row(library: str, size: int, time_us: float, collective: str = "all_reduce") -> dict:
        sides = {"out_of_place": side(size, time_us)}
        return {"library": library, "size": size, "collective": collective, **sides}

    rows = [
        row("gpucoll", 4096, 50),
        row("gpucoll", 1 << 20, 100),
        row("gpucoll-plan", 1 << 20, 60),
    ]
    rows.append(row("gpucoll", 1 << 20, 1, "all_gather"))
    copies = [row("copy", 1 << 20, 10), row("copy", 4096, 10)]
    found = lines_of_direct({"results": rows, "limit": copies})
    assert [line.split(" through direct: ")[1] for line in found] == [
        "0.50 of what its copies and reductions allow  wanted 0.7  MISSED",
        "0.83 of what its copies and reductions allow  wanted 0.7",
    ]
    assert found[1].startswith("gpucoll-plan all_reduce of 1048576 bytes, 2 ranks")
    assert lines_of_direct({}) == []


@pytest.mark.parametrize("word", gpu_check.SANITIZED.split(" or "))
def test_what_is_sanitized_exists(word):
    assert f"def {word}" in (ROOT / "tests/kernels/gpu/test_on_gpu.py").read_text()
