"""The report on a failure: one file for what has one cause, which the errors of all ranks name."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from tests.ranks import Ended
from tests.waiting import SOON_S, is_broken, until

from gpucoll import config
from gpucoll.errors import ArgumentError, GpucollError, MismatchError
from gpucoll.group.host import report
from gpucoll.group.host.report import Claim, State
from gpucoll.observe import report as writer
from gpucoll.observe import stacks

SHORT = np.ones(4, np.float32)
CALLED = "all_reduce(op=sum, float32, shape (4,))"


def reporting(folder, **changes):
    """Return a context in which failures are reported, even by a busy machine."""
    os.environ[config.REPORT_DIR] = str(folder)  # the rank forgets it after the call
    return mock.patch.multiple(report, **{"LIMIT_S": 40.0, **changes})


def failing(comm, folder, kind, **changes):
    """Fail in one way or another; return the error's text."""
    comm.all_reduce(SHORT)
    late = comm.rank == 1 and kind != "mismatch"
    if kind == "lost" and late:
        os.kill(os.getpid(), signal.SIGKILL)
    if late:
        until(lambda: is_broken(comm) and any(folder.glob("*.txt")))
    with reporting(folder, **changes), pytest.raises(GpucollError) as caught:
        comm.all_reduce(SHORT[: 3 if kind == "mismatch" and comm.rank == 1 else 4])
    return str(caught.value)


def the_file(folder, texts):
    """Return the only report, which all of these errors name."""
    (path,) = folder.iterdir()
    assert all(text.endswith(f". Report: {path}") for text in texts), texts
    return path.read_text()


def test_a_deadline(ranks, tmp_path):
    folder = tmp_path / "made" / "when needed"
    texts = ranks.call(3, failing, folder, "late", timeout_s=0.3)
    said = the_file(folder, texts)
    head, error, verdict, rest = said.split("\n\n", 3)
    assert head.startswith("gpucoll ")
    assert error in [text.partition(". Report: ")[0] for text in texts]
    assert verdict.startswith("Ranks 0, 2 have been waiting for ")
    assert f"in {CALLED} (#2) for rank 1. It is in no call of this communicator" in verdict
    assert f"  ranks 0, 2: waiting in {CALLED} (#2), for " in rest
    if stacks.missing():
        assert rest.endswith(f"  ({stacks.missing()})\n")
    else:
        assert f"  failing ({__file__}:" in rest
        assert "/host/report.py:" not in rest


def test_a_mismatch_and_the_next_one(ranks, tmp_path):
    def mismatches(comm):
        first = failing(comm, tmp_path, "mismatch")
        comm.barrier()
        assert failing(comm, tmp_path, "mismatch").partition("Report: ")[2] in first
        return first

    said = the_file(tmp_path, ranks.call(3, mismatches))
    assert "\n\nNo rank had been waiting before: the error above is the cause.\n\n" in said
    assert "\n  rank 1: waiting in all_reduce(op=sum, float32, shape (3,)) (#2)\n" in said
    assert f"\n  ranks 0, 2: waiting in {CALLED} (#2)\n" in said


def test_a_lost_rank(ranks, tmp_path):
    replies = ranks.replies(3, failing, tmp_path, "lost")
    assert isinstance(replies[1], Ended)
    said = the_file(tmp_path, [replies[rank].result for rank in (0, 2)])
    assert "  rank 1: in no call of this communicator; the last collective: " in said
    assert " has ended\n" in said
    assert "no stack" not in said


def test_an_abort_is_reported_by_the_others(ranks, tmp_path):
    def aborts(comm):
        if comm.rank == 1:
            comm.abort()
        with reporting(tmp_path), pytest.raises(GpucollError) as caught:
            comm.all_reduce(SHORT)
        return str(caught.value)

    texts = ranks.call(3, aborts)
    assert "Report: " not in texts.pop(1)
    the_file(tmp_path, texts)


@pytest.mark.soak
def test_parts_of_one_communicator_fail_for_one_cause(ranks, tmp_path):
    """Rank 3 is in no call; the ranks wait for it in two different communicators."""

    def fails(comm):
        with comm.split(comm.rank % 2, comm.rank) as part, comm.duplicate() as other:
            if comm.rank == 3:
                until(lambda: is_broken(part) and is_broken(other) and any(tmp_path.glob("*.txt")))
            with reporting(tmp_path), pytest.raises(GpucollError) as caught:
                (part if comm.rank in (1, 3) else other).all_reduce(SHORT, timeout_s=0.3)
            return str(caught.value)

    the_file(tmp_path, ranks.call(4, fails))


@pytest.mark.soak
def test_each_host_has_its_own(hosts, tmp_path):
    texts = hosts.call("aab", failing, tmp_path, "late", timeout_s=0.3)
    paths = {text.rpartition("Report: ")[2] for text in texts}
    assert {str(path) for path in tmp_path.iterdir()} == paths
    assert len(paths) == 2
    assert texts[0].endswith(texts[1].rpartition(" ")[2])
    assert any("rank 1: in no call" in Path(path).read_text() for path in paths)


def test_hosts_that_make_different_calls(hosts, tmp_path):
    texts = hosts.call("ab", failing, tmp_path, "mismatch")
    assert all(" called all_reduce(" in text for text in texts), texts
    assert sorted(text.rpartition("Report: ")[2] for text in texts) == sorted(
        map(str, tmp_path.iterdir())
    )


# --- what must not happen -------------------------------------------------------------------------


def test_there_is_none_for_an_argument_or_without_the_variable(ranks, tmp_path):
    def fails(comm):
        os.environ[config.REPORT_DIR] = str(tmp_path)
        with pytest.raises(ArgumentError):
            comm.all_reduce(SHORT, "no operation")
        del os.environ[config.REPORT_DIR]
        with pytest.raises(MismatchError) as caught:
            comm.all_reduce(np.ones(1 + comm.rank))
        return str(caught.value)

    assert not any("eport: " in text for text in ranks.call(2, fails))
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_cannot_be(ranks, tmp_path):
    folder = tmp_path / "file"
    folder.touch()
    texts = ranks.call(2, failing, folder, "mismatch")
    assert sum(f"No report: {folder}: File exists" in text for text in texts) == 1
    assert sum(" could not write it" in text for text in texts) == 1


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("kind", ["mismatch", "late"])
def test_hosts_without_a_folder_say_so_once(hosts, tmp_path, kind):
    def fails(comm):
        comm.all_reduce(SHORT)
        if comm.rank == 1 and kind == "late":
            until(lambda: is_broken(comm))
        with reporting(tmp_path / "file"), pytest.raises(GpucollError) as caught:
            comm.all_reduce(SHORT[: 4 - (comm.rank == 1 and kind == "mismatch")])
        return str(caught.value)

    (tmp_path / "file").touch()
    texts = hosts.call("ab", fails, timeout_s=0.3 if kind == "late" else 30.0)
    assert all(text.count("No report: ") == 1 for text in texts), texts


def test_no_link_is_followed(tmp_path, monkeypatch):
    path, other = tmp_path / "report.txt", tmp_path / "other"
    (tmp_path / ".report.txt.part").symlink_to(other)
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)
    monkeypatch.setattr(sys, "stdin", mock.Mock())
    monkeypatch.setattr(writer, "report_on", lambda *_: "text")
    assert writer.main([str(path), "1", "1"]) == 1
    assert not other.exists()
    assert not path.exists()


@pytest.mark.parametrize("program", ["import time; time.sleep(60)", "import nothing_of_this_name"])
def test_a_report_that_does_not_come_delays_no_error(ranks, tmp_path, program):
    def fails(comm):
        begun_s = time.monotonic()
        text = failing(comm, tmp_path, "mismatch", LIMIT_S=0.5, _PROGRAM=program)
        assert time.monotonic() - begun_s < SOON_S
        return text

    assert all(". No report: " in text for text in ranks.call(2, fails))
    assert not [*tmp_path.iterdir()]


def test_claims():
    claim = Claim(int(time.time()), 4_194_303, True, State.WRITTEN)
    assert Claim.of(claim.word) == claim
    assert claim.is_recent
    assert not claim._replace(begun_s=claim.begun_s - 100).is_recent
    assert Claim.of(0) == (0, 0, False, 0)
    assert not Claim.of(0).is_recent
