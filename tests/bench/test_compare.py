"""``gpucoll-bench compare`` on files whose times a test has chosen."""

from __future__ import annotations

import json

import pytest
from tests.bench import kept_results
from tests.bench.kept_results import content, environment, write

from gpucoll.bench import cli


def compare(tmp_path, base, new, *options):
    """Return the exit code of the command on two contents."""
    paths = [write(tmp_path, "base.json", base), write(tmp_path, "new.json", new)]
    return cli.main(["compare", *paths, *options])


def slow_at_1_ki(library, side, size):
    return 1.2 if (library, side, size) == ("gpucoll", "in_place", 1024) else 1.0


def slow_machine(library, side, size):
    return 1.4


def slow_machine_and_call(library, side, size):
    return 1.4 * slow_at_1_ki(library, side, size)


def test_nothing_changed(tmp_path, capsys):
    assert compare(tmp_path, content(1), content(2)) == 0
    out = capsys.readouterr().out
    assert "slower: 0 of 26 calls\nfaster: 0 of 26 calls\nmedian of new / base" in out


def test_a_slower_call_is_named_and_is_the_exit_code(tmp_path, capsys):
    assert compare(tmp_path, content(1), content(2, factor=slow_at_1_ki)) == 1
    lines = capsys.readouterr().out.splitlines()
    where = lines.index("slower: 1 of 26 calls")
    words = lines[where + 2].split()
    assert words[:7] == ["all_reduce", "float32", "sum", "in", "place", "1", "Ki"]
    assert words[7] == "gpucoll"
    assert lines[where + 3] == "faster: 0 of 26 calls"

    assert compare(tmp_path, content(2, factor=slow_at_1_ki), content(1)) == 0
    assert "faster: 1 of 26 calls" in capsys.readouterr().out
    assert compare(tmp_path, content(1), content(2, factor=slow_at_1_ki), "--threshold", "30%") == 0


def test_a_slower_machine_is_not_a_slower_program(tmp_path, capsys):
    assert compare(tmp_path, content(1), content(2, factor=slow_machine)) == 0
    out = capsys.readouterr().out
    assert "The machine was slower in new: --relative-to best or limit divides that out" in out
    assert "impi 1.40 (26), limit 1.40 (26), mpich 1.40 (26)" in out

    new = content(2, factor=slow_machine_and_call)
    for relative_to in ("best", "mpich", "limit"):
        assert compare(tmp_path, content(1), new, "--relative-to", relative_to, "--json") == 1
        found = json.loads(capsys.readouterr().out)
        slower = [one for one in found["calls"] if one["verdict"] == "slower"]
        assert [(one["size"], one["side"]) for one in slower] == [(1024, "in_place")]
        assert slower[0]["low"] < 1.2 < slower[0]["high"]
        assert found["relative_to"] == relative_to
        assert found["controls"]["limit"]["calls"] == 26


def without_peers(seed, **more):
    made = content(seed, limit=False, **more)
    made["results"] = [entry for entry in made["results"] if entry["library"] == "gpucoll"]
    return made


def test_what_gpucoll_runs_for_comparison_is_no_control(tmp_path, capsys):
    made = [content(seed, factor=slow) for seed, slow in ((1, None), (2, slow_machine))]
    for one in made:
        for entry in one["results"]:
            if entry["library"] == "mpich":
                entry["library"] = "gpucoll-bound"
    compare(tmp_path, *made)
    assert "impi 1.40 (26), limit 1.40 (26)\n" in capsys.readouterr().out


def test_figures_without_times(tmp_path, capsys):
    made = content(sizes=(4,))
    for entry in [*made["results"], *made["limit"]]:
        entry |= {"out_of_place": None, "in_place": None, "figures": {"shared_mib": 1.0}}
    assert compare(tmp_path, made, made) == 2
    assert "neither file has times" in capsys.readouterr().err


def test_without_peers_the_intervals_say_what_they_cover(tmp_path, capsys):
    assert compare(tmp_path, without_peers(1), without_peers(2, factor=slow_at_1_ki)) == 1
    assert "Fewer than 8 times of peers or limits are in both files" in capsys.readouterr().out
    assert compare(tmp_path, without_peers(1), without_peers(2), "--relative-to", "best") == 2
    assert "neither peers nor limits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"cpu": "Another"}, "cpu A CPU in base, Another in new (--force compares nevertheless)"),
        ({"ranks": 4}, "ranks 2 in base, 4 in new"),
        ({"pinned_cpus": None}, "pinned True in base, False in new"),
        ({"array": "cupy"}, "array numpy in base, cupy in new"),
    ],
)
def test_other_machines_and_ranks_are_refused(tmp_path, capsys, about, said):
    assert compare(tmp_path, content(1), content(2, **about)) == 2
    assert said in capsys.readouterr().err
    assert compare(tmp_path, content(1), content(2, **about), "--force") == 0
    assert f"# note: {said.partition(' (')[0]}" in capsys.readouterr().out


def test_other_calls_are_refused(tmp_path, capsys):
    new = content(2)
    for entry in new["results"]:
        entry["type"] = "float64"
    assert compare(tmp_path, content(1), new) == 2
    said = capsys.readouterr().err
    assert "all_reduce float32 sum in base, all_reduce float64 sum in new" in said


def test_notes(tmp_path, capsys):
    libraries = {**environment()["libraries"], "impi": {"library": "impi 2"}}
    new = content(2, rounds=3, libraries=libraries, kernel="Linux 6.2")
    new["results"][0]["in_place"]["nwrong"] = 1
    new["results"] = [entry for entry in new["results"] if entry["size"] > 4]
    assert compare(tmp_path, content(1), new) == 0
    out = capsys.readouterr().out
    assert "# note: kernel Linux 6.1 x86_64 in base, Linux 6.2 in new" in out
    assert "# note: impi: impi 1 in base, impi 2 in new, so its times show nothing" in out
    assert "impi 1." not in out.partition("median (calls):")[2].partition("\n")[0]
    assert "too few rounds (3)" in out
    assert "only in base: 2 calls" in out


@pytest.mark.parametrize("threshold", ["-1", "five", "5 %%", "nan"])
def test_bad_thresholds(capsys, threshold):
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", "a", "b", f"--threshold={threshold}"])
    assert ended.value.code == 2
    assert "is not a percentage such as 5%" in capsys.readouterr().err


def test_a_missing_file(tmp_path, capsys):
    base = write(tmp_path, "base.json", kept_results.content())
    assert cli.main(["compare", base, str(tmp_path / "new.json")]) == 2
    assert capsys.readouterr().err.endswith("new.json: No such file or directory\n")
