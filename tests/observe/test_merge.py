"""`gpucoll why --merge`: what several hosts' ranks say of themselves is judged as one job."""

from __future__ import annotations

import io
import json
import random
import sys
from dataclasses import replace

import numpy as np
import pytest
from tests.group.world.test_namespaces import ENVIRONMENT, made_namespaces, on_namespaces
from tests.waiting import until

from gpucoll.observe import segments, why
from gpucoll.observe.json_report import FORMAT, Report, ReportError, as_json, from_json
from gpucoll.observe.look import Job, RankLook, jobs_of, look
from gpucoll.observe.merge import merge
from gpucoll.observe.processes import Process
from gpucoll.observe.stacks import Stack
from gpucoll.observe.text import lines_of
from gpucoll.observe.verdict import Verdict, judge

SHORT = np.ones(4, np.float32)
CALL = "waiting in all_reduce(op=sum, float32, shape (4,)) (#2)"


def report(host, ranks, *, group="g", total=4, taken_s=100.0):
    """Return the report of a host whose processes are numbered from 100 on."""
    processes: dict[int, Process | None] = {}
    for one in ranks:
        processes[one.pid] = Process(one.pid, "python", "S", 1, 0, 0)
    job = Job(
        processes,
        dict.fromkeys(processes, 0.0),
        ranks,
        [""],
        total - len(ranks),
        [group],
        [total],
        "train.py",
        taken_s,
        [host],
    )
    return Report(job, {100: Stack(("main (a.py:1)",))})


def waits(rank, pid, **facts):
    """Return a rank in the call."""
    given = {"is_in_call": True, "is_in_collective": True, "since_s": 5.0, "calls": 2, **facts}
    return RankLook(0, rank, pid, CALL, **given)


def leader(rank, **facts):
    """Return a leader that waits for other hosts."""
    return waits(rank, 100, awaits_other_hosts=True, **facts)


def absent(rank, pid):
    return RankLook(0, rank, pid, "in no call of this communicator; no collective before", False)


def pair(there):
    """Return the reports of host a, which is in the call, and of b with these ranks."""
    return [report("a", [leader(0), waits(1, 101, awaited=[100])]), report("b", there)]


def verdict_on(reports):
    (merged,) = merge([read for one in reports for read in again(one)])
    return judge(merged.job), merged


def again(one):
    """Return a report after it was written and read."""
    return from_json(as_json([(one, judge(one.job))]))


def test_a_rank_of_another_host_is_named():
    verdict, merged = verdict_on(pair([absent(2, 100), waits(3, 101, awaited=[100])]))
    assert (verdict.kind, verdict.ranks) == ("waiting", (2,))
    assert verdict.text == (
        "Ranks 0, 1, 3 have been waiting for 5.0 s in all_reduce(op=sum, float32, shape (4,)) (#2) "
        "for rank 2. It is in no call of this communicator; no collective before; process 100 on b "
        "sleeps."
    )
    assert merged.job.elsewhere == 0
    assert sorted(merged.job.spelled(pid) for pid in merged.stacks) == ["100 on a", "100 on b"]


def test_a_stopped_rank_of_another_host_is_named():
    reports = pair([leader(2), waits(3, 101, awaited=[100])])
    stopped = replace(reports[1].job.processes[100], state="T")
    reports[1].job.processes[100] = stopped
    verdict, _ = verdict_on(reports)
    assert (verdict.kind, verdict.ranks) == ("stopped", (2,))
    assert verdict.text.endswith("kill -CONT 100 on b lets it go on.")


def test_hosts_that_do_not_hear_of_each_other():
    verdict, _ = verdict_on(pair([leader(2), waits(3, 101, awaited=[100])]))
    assert verdict.kind == "link"
    assert verdict.text.endswith(
        "which all ranks have entered, and nothing moves: the connection between a and b does not "
        "carry data."
    )


def test_hosts_whose_data_moves_are_slow():
    verdict, _ = verdict_on(pair([leader(2, has_traffic=True), waits(3, 101, awaited=[100])]))
    assert verdict.kind == "moving"
    assert "for data that is on its way: slow, not stuck." in verdict.text


def test_data_that_is_not_acknowledged_is_evidence():
    reports = pair([leader(2, unacknowledged=["10.0.0.1"]), waits(3, 101, awaited=[100])])
    verdict, _ = verdict_on(reports)
    assert verdict.kind == "link"
    assert verdict.text.endswith(" What rank 2 has sent to 10.0.0.1 is not acknowledged.")


def test_a_host_that_was_asked_in_vain():
    (here,) = pair([])[:1]
    here.job.silent["b"] = [2, 3]
    verdict = judge(here.job)
    assert verdict.text.endswith(
        "Nothing is heard of b (ranks 2, 3): its first rank is stopped or has ended, or the "
        "connection to it does not carry data."
    )
    assert verdict.ranks == (2, 3)
    lines = [*lines_of(here.job, verdict, {}, False)]
    assert lines[-1] == (
        "  ranks 2, 3: b did not answer. Run gpucoll why --json there, and gpucoll why --merge "
        "here."
    )


def test_a_circle_over_hosts():
    message = {"is_in_collective": False, "awaits_other_hosts": True}
    ranks = [waits(rank, 100, abroad=[1 - rank], **message) for rank in range(2)]
    for one in ranks:
        one.text = f"waiting in recv(source={one.abroad[0]})"
    verdict, _ = verdict_on([report("ab"[place], [ranks[place]], total=2) for place in range(2)])
    assert (verdict.kind, verdict.ranks) == ("circle", (0, 1))


def test_what_one_host_lacks():
    verdict, merged = verdict_on(pair([])[:1])
    assert verdict.kind == "elsewhere"
    assert merged.job.elsewhere == 2


def test_the_last_look_at_a_host_counts():
    old, there = pair([absent(2, 100), absent(3, 101)])
    new = report("a", [absent(0, 100), absent(1, 101)], taken_s=101.0)
    for reports in ([old, there, new], [new, there, old]):
        assert verdict_on(reports)[0].kind == "outside"


def test_a_communicator_of_one_host_stays_its_own():
    reports = pair([absent(2, 100), absent(3, 101)])
    for one in reports:
        one.job.names.append("local")
        one.job.groups.append("")
        one.job.totals.append(2)
        own = [replace(each, communicator=1, rank=each.rank % 2) for each in one.job.ranks]
        one.job.ranks += own
    merged = verdict_on(reports)[1]
    assert merged.job.names == ["", "local", "local"]
    assert [one.rank for one in merged.job.ranks if one.communicator == 2] == [0, 1]


# --- the command ----------------------------------------------------------------------------------


def run(capsys, *arguments):
    code = why.main([str(each) for each in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def written(folder, name, *reports):
    path = folder / name
    path.write_text(as_json([(one, judge(one.job)) for one in reports]))
    return path


def test_the_command(tmp_path, capsys):
    here, there = pair([absent(2, 100), waits(3, 101, awaited=[100])])
    paths = written(tmp_path, "a.json", here), written(tmp_path, "b.json", there)
    code, out, err = run(capsys, "--merge", *paths)
    assert (code, err) == (why.EXIT_STUCK, "")
    assert "for rank 2." in out
    assert "4 ranks of train.py on 2 hosts:" in out
    assert "process 100 on b sleeps, 0% CPU" in out
    code, out, _ = run(capsys, "--merge", *paths, "--json")
    (job,) = json.loads(out)["jobs"]
    assert job["verdict"]["ranks"] == [2]
    assert [host["host"] for host in job["hosts"]] == ["a", "b"]
    (tmp_path / "both.json").write_text(out)  # what was merged can be merged again
    assert run(capsys, "--merge", tmp_path / "both.json")[1].startswith("Ranks 0, 1, 3 have been")


def test_standard_input(tmp_path, capsys, monkeypatch):
    paths = [written(tmp_path, one.job.hosts[0], one) for one in pair([absent(2, 100)])]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(path.read_text() for path in paths)))
    code, out, _ = run(capsys, "--merge", "-")
    assert code == why.EXIT_STUCK
    assert "1 more rank is on other hosts" in out


def test_files_of_different_jobs(tmp_path, capsys):
    here, there = pair([absent(2, 100)])
    there.job.groups[0] = "another"
    paths = written(tmp_path, "a.json", here), written(tmp_path, "b.json", there)
    code, out, err = run(capsys, "--merge", *paths)
    assert (code, out) == (why.EXIT_NONE, "")
    assert f"{paths[0]} (of a) is of another job than the other files" in err


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "is empty: gpucoll why --json has found no job there"),
        ("[]", "it has no format"),
        ('{"format": 1', "is not what gpucoll why --json prints, or not all of it"),
        ('{"format": 1, "gpucoll": "9", "jobs": [{}]}', "is damaged: KeyError('hosts')"),
        (
            json.dumps({"format": FORMAT + 1, "gpucoll": "9.9", "jobs": 1}),
            f"has format {FORMAT + 1}, of gpucoll 9.9; this is gpucoll ",
        ),
    ],
)
def test_a_file_that_cannot_be_read_as_one(tmp_path, capsys, text, error):
    path = tmp_path / "a.json"
    path.write_text(text)
    code, out, err = run(capsys, "--merge", path)
    assert (code, out) == (why.EXIT_NONE, "")
    assert err.startswith(f"gpucoll why: {path} ")
    assert error in err


def test_a_file_that_is_not_there(tmp_path, capsys):
    code, _, err = run(capsys, "--merge", tmp_path / "none")
    assert code == why.EXIT_NONE
    assert "cannot be read: " in err


@pytest.mark.parametrize("seed", range(30))
def test_damage_is_an_error_or_another_report(seed):
    """A word of the text becomes another one; nothing but a `ReportError` may come of it."""
    chance = random.Random(seed)
    words = as_json([(one, judge(one.job)) for one in pair([absent(2, 100)])]).split(" ")
    for _ in range(20):
        damaged = [*words]
        damaged[chance.randrange(len(words))] = chance.choice(["-7,", "null,", '"x",', "[]", "{"])
        try:
            for merged in merge(from_json(" ".join(damaged))):
                judge(merged.job)
        except ReportError:
            continue


# --- real ranks -----------------------------------------------------------------------------------


@pytest.fixture
def namespaces():
    yield from made_namespaces()


def reduce_until(comm, go):
    while not comm.all_reduce(int(go.exists()), "max"):
        pass


@pytest.mark.soak
def test_a_link_that_is_cut(hosts, rank_server, namespaces, tmp_path):
    go = tmp_path / "go"
    with rank_server.fork(3) as pool:
        hosts.start(
            pool,
            "aab",
            on_namespaces,
            namespaces.names,
            reduce_until,
            go,
            gives="seat",
            environment=ENVIRONMENT,
            timeout_s=60.0,
        )
        pids = [rank.pid for rank in pool.ranks]
        until(lambda: [one.kind for one in verdicts_on(pids)] == ["moving"])
        namespaces.cut_off(1)
        seen: list[Verdict] = []

        def is_cut():
            seen[:] = verdicts_on(pids)
            return seen[0].kind == "link" and "has sent to 10.78.0." in seen[0].text

        try:
            until(is_cut)
        finally:
            namespaces.restore(1)
            go.touch()
            pool.results()
    assert "the connection between " in seen[0].text


def verdicts_on(pids):
    found = segments.find(pids)
    try:
        parts = [Report(look(job, 0.1), {}) for job in jobs_of(found.parts)]
    finally:
        found.close()
    return [judge(one.job, 0.1) for one in merge([read for part in parts for read in again(part)])]


def receive(comm, source, go):
    comm.barrier()
    if comm.rank == source:
        until(go.exists)
        comm.send(SHORT, 0, 7)
    if comm.rank == 0:
        comm.recv(like=SHORT, source=source, tag=7)
    comm.all_reduce(SHORT)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", ["aabb", "abb", "abc"])
def test_ranks_of_several_hosts(hosts, rank_server, tmp_path, placed):
    go, last = tmp_path / "go", len(placed) - 1
    with rank_server.fork(len(placed)) as pool:
        hosts.start(pool, placed, receive, last, go)
        pids = [rank.pid for rank in pool.ranks]
        seen: list[Verdict] = []

        def is_found():
            found = segments.find(pids)
            try:
                parts = [Report(look(job, 0.05), {}) for job in jobs_of(found.segments)]
            finally:
                found.close()
            merged = merge([read for part in parts for read in again(part)])
            seen[:] = [judge(one.job, 0.1) for one in merged]
            is_one = len(merged) == 1 and len(merged[0].job.hosts) == len({*placed})
            return is_one and (seen[0].kind, seen[0].ranks) == ("waiting", (last,))

        try:
            until(is_found)
        finally:
            go.touch()
            pool.results()
    assert "source=" in seen[0].text or "all_reduce" in seen[0].text


@pytest.mark.parametrize("more", [["7"], ["--watch"], ["--local"]])
def test_merge_takes_no_processes(more, capsys):
    with pytest.raises(SystemExit) as ended:
        why.main([*more, "--merge", "one.json"])
    assert ended.value.code == 2
    assert "--merge looks at no process" in capsys.readouterr().err
