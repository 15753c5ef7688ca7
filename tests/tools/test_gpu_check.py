"""The check for a GPU, on machines without one: what it does with steps, faults and results."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import gpu_check  # noqa: E402
import gpu_check_process  # noqa: E402
import gpu_check_report  # noqa: E402
import gpu_check_steps  # noqa: E402
from gpu_check import Step, check  # noqa: E402
from gpu_check_table import lines_of_direct  # noqa: E402

sys.path.remove(str(ROOT / "tools"))

from gpucoll import config  # noqa: E402

KEYS = {"schema", "status", "runs", "steps", "results"}
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
    assert report["schema"] == gpu_check_report.SCHEMA
    assert sorted(path.name for path in folder.iterdir()) == ["gpu_check.json", "gpu_check.tar.gz"]
    return report


def statuses(report: dict) -> dict[str, str]:
    return {step["name"]: step["status"] for step in report["steps"]}


def archived(folder: Path) -> dict[str, str]:
    with tarfile.open(folder / "gpu_check.tar.gz") as archive:
        files = [(name, archive.extractfile(name)) for name in archive.getnames()]
        return {name: file.read().decode() for name, file in files if file is not None}


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


@pytest.mark.soak
def test_without_a_gpu(tmp_path):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "tools/gpu_check.py"), "--output", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == gpu_check.NO_GPU, done.stdout + done.stderr
    assert done.stdout.startswith("no GPU: ")
    report = report_in(tmp_path)
    assert report["status"] == "no GPU"
    assert report["runs"][0]["environment"]["versions"]["numpy"]
    assert [step["name"] for step in report["steps"]] == ["environment"]
    assert not report["results"]


def writing(work: Path, name: str, found: object) -> dict:
    """Return how a step writes a result."""
    path = str(work / name)
    return {"program": f"import json; json.dump({found!r}, open({path!r}, 'w'))", "result": name}


def test_everything_passes(tmp_path, capsys):
    rows = [
        {"name": "scan", "ranks": 2, "status": "failed", "detail": "off by 1"},
        {"name": "time of x", "ranks": 2, "status": "passed", "detail": "", "time_s": 1e-3},
    ]
    copies = [{"name": "GPU to pinned", "status": "passed", "detail": "", "rate": 25e9}]
    found = {"benchmark reduce": [ROW], "doctor": {"cpus": 2}, "collectives nccl 1": rows}
    found["memory copies"] = copies

    def steps(work):
        made = [python(name, **writing(work, f"{name}.json", each)) for name, each in found.items()]
        return [python("tests", "print('12 passed')"), *made]

    assert check(tmp_path, steps, 300, ENVIRONMENT) == gpu_check.OK
    report = report_in(tmp_path)
    assert report["status"] == "passed"
    assert {*statuses(report).values()} == {"passed"}
    assert report["steps"][1]["detail"] == "12 passed"
    assert report["results"] == found
    assert archived(tmp_path)["tests.log"] == "12 passed\n"
    text = capsys.readouterr().out
    assert "Imaginary, driver 13000" in text
    assert "0.95 x copy  wanted 0.9\n" in text
    assert "collectives nccl 1: 1 failed, 1 passed\n  failed: scan: off by 1\n" in text
    assert "1000.0 us" in text
    assert "25.0 GB/s  passed" in text
    assert text.rstrip().endswith("passed; every number is in gpu_check.json")


SANITIZED = "print('4 passed in 1.00s'); print('========= ERROR SUMMARY: 0 errors')"

HANGS = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
command = [sys.executable, "-c", "import time; time.sleep(600)"]
children = [subprocess.Popen(command, start_new_session=is_apart) for is_apart in (False, True)]
with open({rows!r}, "w") as file:
    file.write("[{{")
with open({pids!r}, "w") as file:
    file.write(" ".join(str(child.pid) for child in children))
print("about to hang", flush=True)
time.sleep(600)
"""
FAILS = "import sys\nfor n in range(300): print(n)\nsys.exit(3)"
PRINTS = "while True: print('again' * 1000)"
FILLS = """
import tempfile, time
name = tempfile.mktemp()
print(f"writes {name}", flush=True)  # first: the step is ended as soon as the file is there
open(name, "wb").write(b"x" * 1000)
time.sleep(600)
"""


@pytest.mark.soak
def test_faults_end_nothing_but_themselves(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check_process, "MOST_LOG_BYTES", 1 << 20)
    usage = shutil.disk_usage

    def small(folder):
        """Say that a disk is full which has files of the step that fills it."""
        is_full = any(path.is_file() for path in folder.glob("*.tmp/tmp*"))
        return usage(folder)._replace(free=0) if is_full else usage(folder)

    monkeypatch.setattr(shutil, "disk_usage", small)
    pids = tmp_path / "pids"

    def steps(work):
        rows = str(work / "rows.json")
        return [
            python("fails", FAILS),
            python("dies", "import os; os.abort()"),
            python("hangs", HANGS.format(rows=rows, pids=str(pids)), 5, result="rows.json"),
            python("fills the disk", FILLS),
            python("prints", PRINTS),
            python("needs more", "print()", needs=["numpy", "ml_dtypes"]),
            python("comes last", **writing(work, "last.json", [1])),
        ]

    output = tmp_path / "output"
    assert check(output, steps, 300, ENVIRONMENT) == gpu_check.FAILED
    report = report_in(output)
    assert report["status"] == "failed"
    found = {step["name"]: (step["status"], step["detail"]) for step in report["steps"]}
    assert found["fails"] == ("failed", "299")
    assert found["dies"] == ("failed", "ended by SIGABRT")
    assert found["hangs"] == ("killed", "not done after 5 s: about to hang")
    status, detail = found["fills the disk"]
    assert status == "killed"
    assert detail.startswith("the disk is full: 0 MiB are left: writes ")
    assert not Path(detail.rpartition(" ")[2]).exists()
    assert found["prints"][0] == "killed"
    assert found["prints"][1].startswith("more than 1 MiB of output: ")
    assert found["needs more"] == ("not run", "ml_dtypes does not work here: no")
    assert found["comes last"][0] == "passed"
    lines = {step["name"]: step["lines"] for step in report["steps"]}
    assert lines["fails"] == [str(n) for n in range(200, 300)]
    assert lines["comes last"] == []
    assert report["results"] == {"comes last": [1]}
    kept = archived(output)
    assert kept["fails.log"].splitlines() == [str(n) for n in range(300)]
    assert len(kept["prints.log"]) == gpu_check_process.KEPT_LOG_BYTES
    assert kept["rows.json"] == "[{"
    assert not any(is_running(int(pid)) for pid in pids.read_text().split())
    assert "failed; every number" in capsys.readouterr().out


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_results_are_written_on_a_full_disk(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=48m", "none", str(place)]
    if subprocess.run(options, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        (work := tmp_path / "work").mkdir()
        (work / "a.log").write_text("said")
        keeper, report = gpu_check_report.Keeper(place, work), gpu_check_report.Report()
        free = shutil.disk_usage(place).free
        (place / "rest").write_bytes(bytes(free))
        assert shutil.disk_usage(place).free == 0
        report.runs.append({})
        for number in range(2):
            report.add(gpu_check_report.Outcome(str(number), "passed"))
            keeper.write(report)
        (place / "rest").unlink()
        keeper.close()
        found = json.loads((place / "gpu_check.json").read_text())
        assert [step["name"] for step in found["steps"]] == ["0", "1"]
        assert archived(place) == {"a.log": "said"}
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.soak
def test_tests_that_are_all_skipped_check_nothing(tmp_path):
    file = tmp_path / "test_nothing.py"
    file.write_text("import pytest\ndef test(): pytest.skip('no GPU')\n")
    pytest_of = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    sanitized = [sys.executable, "-c", SANITIZED, "pytest"]
    steps = [Step("tests", pytest_of, 60), Step("two ranks", pytest_of, 60, may_skip=True)]
    steps.append(Step("compute-sanitizer", sanitized, 60))
    output = tmp_path / "output"
    assert check(output, lambda work: steps, 300, ENVIRONMENT) == gpu_check.FAILED
    _, void, excused, sanitizer = report_in(output)["steps"]
    assert (void["status"], excused["status"]) == ("failed", "passed")
    assert sanitizer["status"] == "passed"
    assert "1 skipped" in void["detail"]


def test_a_search_that_hangs_is_no_gpu(tmp_path, monkeypatch, capsys):
    def hang(command, limit_s, log):
        log.write_text("in the driver")
        return gpu_check_process.Ended("killed", 90.0, "in the driver")

    monkeypatch.setattr(gpu_check, "run_watched", hang)
    assert check(tmp_path) == gpu_check.NO_GPU
    assert "looking for one killed: in the driver" in capsys.readouterr().out


@pytest.mark.soak
def test_what_did_not_fit_into_the_time_is_done_by_a_second_run(tmp_path, capsys):
    """A step begins where its limit fits; the second run takes over what the first one has."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    hanging = tmp_path / "hanging"
    hanging.touch()
    hangs = "import time; time.sleep(60 * __import__('os').path.exists({!r}))"

    def steps(work):
        return [
            python("warm", "print('warm')", 20, is_preparation=True),
            python("works", **writing(work, "works.json", [1]), limit_s=20),
            python("fails", "import sys; sys.exit(1)", 20),
            python("hangs", hangs.format(str(hanging)), 1),
            python("long", **writing(work, "long.json", [2]), limit_s=200),
            python("short", "print()", 20),
        ]

    assert check(first, steps, 100, ENVIRONMENT) == gpu_check.FAILED
    report = report_in(first)
    states = ["passed", "passed", "passed", "failed", "killed", "not run", "passed"]
    assert [*statuses(report).values()] == states
    assert report["steps"][5]["detail"].startswith("it may take 200 s, and ")
    assert report["results"] == {"works": [1]}
    assert "2 steps are left: --again gpu_check.json" in capsys.readouterr().out

    hanging.unlink()
    again = first / "gpu_check.json"
    assert check(second, steps, 500, ENVIRONMENT, again=again) == gpu_check.FAILED
    report = report_in(second)
    assert [step["name"] for step in report["steps"] if step["status"] != "passed"] == ["fails"]
    assert [step["run"] for step in report["steps"]] == [1, 1, 0, 0, 1, 1, 0]
    assert report["results"] == {"works": [1], "long": [2]}
    assert len(report["runs"]) == 2
    assert "steps are left" not in capsys.readouterr().out

    assert check(third, steps, 500, ENVIRONMENT, only=["w*s", "short"]) == gpu_check.OK
    assert [*statuses(report_in(third))] == ["environment", "warm", "works", "short"]


def test_steps_that_measure_nothing_run_side_by_side(tmp_path):
    """Each of two steps waits for the other one; the next step begins when both have ended."""
    meets = """
import os, sys, time
mine, other, deadline = sys.argv[1], sys.argv[2], time.monotonic() + 30
open(mine, "w")
while not os.path.exists(other):
    assert time.monotonic() < deadline
os.remove(other)
"""
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    nothing = f"import os; assert not os.path.exists({one!r}) and not os.path.exists({two!r})"

    def steps(work):
        pair = [(one, two), (two, one)]
        beside = [Step(Path(a).name, [sys.executable, "-c", meets, a, b], 60) for a, b in pair]
        last = python("last", nothing)
        return [*(dataclasses.replace(step, is_timed=False) for step in beside), last]

    assert check(tmp_path / "output", steps, 300, ENVIRONMENT, jobs=2) == gpu_check.OK
    found = statuses(report_in(tmp_path / "output"))
    assert found == dict.fromkeys(["environment", "one", "two", "last"], "passed")


def test_the_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: f"/opt/{name}")
    steps = {step.name: step for step in gpu_check.steps_of(tmp_path)}
    assert next(iter(steps)) == "warm"
    assert [name for name, step in steps.items() if step.is_preparation] == ["warm"]
    assert "gpu" in steps["tests of kernels"].command
    for step in steps.values():
        for word in step.command:
            if word.startswith(str(ROOT)) and word.endswith(".py"):
                assert Path(word).is_file(), step
        if step.result:
            assert str(tmp_path / step.result) in step.command
    assert "compute-sanitizer" in steps
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "compute-sanitizer" not in [step.name for step in gpu_check.steps_of(tmp_path)]
    ways = [name for name in steps if name.startswith("collectives direct")]
    assert ways == [f"collectives direct {way}" for way in ("2", "1", "4", "2 staged", "3 ring")]
    assert max(step.limit_s for step in steps.values()) < gpu_check.LIMIT_S - 60
    assert gpu_check.main(["--list"]) == 0
    assert "warm" in capsys.readouterr().out


def test_nccl_is_built_where_its_source_is(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check_steps, "HERE", tmp_path / "tools")
    assert gpu_check_steps.nccl_built_of(tmp_path) == []
    (tmp_path / "build" / "nccl").mkdir(parents=True)
    (tmp_path / "build" / "nccl" / "Makefile").touch()
    build, *used = gpu_check_steps.nccl_built_of(tmp_path)
    assert "src.build" in build.command
    library = tmp_path / "build" / "nccl" / "build" / "lib" / "libnccl.so.2"
    for step in used:
        assert f"{config.NCCL_LIBRARY}={library}" in step.command
    library.parent.mkdir(parents=True)
    library.touch()
    assert gpu_check_steps.nccl_built_of(tmp_path) == used


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
