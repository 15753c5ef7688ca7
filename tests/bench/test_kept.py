"""Files with kept results: what is no such file, and several as one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.bench.kept_results import content, write

from gpucoll.bench.kept import CannotReadError, counted, public_command, read


def broken(change):
    made = content(sizes=(4,), rounds=2)
    change(made)
    return made


BROKEN = {
    "no 'results'": lambda made: made.pop("results"),
    "no 'cpu'": lambda made: made["environment"].pop("cpu"),
    "no call was measured": lambda made: made["results"].clear(),
    "no 'samples_us'": lambda made: made["results"][0]["in_place"].pop("samples_us"),
    "not times by rank and round": lambda made: made["results"][0]["in_place"].update(
        samples_us=[1, 2]
    ),
    "inhomogeneous": lambda made: made["limit"][0]["in_place"].update(samples_us=[[1], [1, 2]]),
    "times that are not above 0": lambda made: made["results"][0]["in_place"].update(time=0),
    "a date that is not text": lambda made: made["environment"].update(date=None),
    "a library that is not text": lambda made: made["environment"]["libraries"].update(
        mpich={"library": 4}
    ),
    "not whole numbers": lambda made: made["results"][0].update(size=4.5),
    "no 'nwrong'": lambda made: made["results"][0]["in_place"].pop("nwrong"),
    "not all text": lambda made: made["results"][0].update(type=4),
}


@pytest.mark.parametrize("said", BROKEN)
def test_other_files_are_one_clear_error(tmp_path, said):
    path = Path(write(tmp_path, "a.json", broken(BROKEN[said])))
    with pytest.raises(CannotReadError, match=rf"a\.json: not what gpucoll-bench .*{said}"):
        read(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON, or cut off"),
        ("[]", "not what gpucoll-bench"),
        ("\xff", "not JSON"),
        (json.dumps({"schema": 1, "steps": []}), "measured by tools/gpu_check.py"),
    ],
)
def test_no_results_at_all(tmp_path, text, said):
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CannotReadError, match=said):
        read(path)
    with pytest.raises(CannotReadError, match="Is a directory"):
        read(tmp_path)


def test_the_newest_file_counts_size_by_size():
    old = content(1, sizes=(4, 64, 1024), date="2030-01-01")
    new = content(2, sizes=(64, 4096), date="2030-01-02")
    other = content(3, sizes=(64,), date="2030-01-03", ranks=4)
    hidden = content(4, sizes=(64,), date="2029-01-01")

    found = counted([new, other, old, hidden])

    assert [one["environment"]["date"] for one in found] == [
        "2030-01-01",
        "2030-01-02",
        "2030-01-03",
    ]
    sizes = [{entry["size"] for entry in one["results"]} for one in found]
    assert sizes == [{4, 1024}, {64, 4096}, {64}]
    assert [{entry["size"] for entry in one["limit"]} for one in found] == sizes


def test_files_of_several_machines_are_no_report():
    with pytest.raises(CannotReadError, match=r"differ in cpu \(B, A CPU\)"):
        counted([content(), content(cpu="B", date="2031-01-01")])


@pytest.mark.parametrize(
    ("command", "public"),
    [
        ("b --compare 'impi=/my home/bin,gloo=/x' -n 3", "--compare impi=PYTHON,gloo=PYTHON -n 3"),
        ("b --compare=impi=/x --ranks=2 --csv=/x", "--compare=impi=PYTHON --ranks=2 --csv=FILE"),
        ("b --json '/my home/a.json' --csv - --html /x", "--json FILE --csv FILE --html FILE"),
        ("b --json /the/user's/file", "--json FILE"),
    ],
)  # fmt: skip
def test_a_command_is_shown_without_paths(command, public):
    assert public_command({"command": command}) == f"b {public}"
