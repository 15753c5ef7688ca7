"""Measuring with a launcher's ranks, on a communicator that is alone and only copies."""

from __future__ import annotations

import json

import numpy as np
import pytest

import gpucoll
from gpucoll.bench import cli, launched
from gpucoll.bench.rank.own import Own

SHORT = ["-b", "4", "-e", "1K", "-f", "16", "-n", "3", "-w", "1", "--rounds", "3"]


class Alone:
    rank = 0
    world_size = 1

    def __init__(self, commands=()):
        self.commands = list(commands)
        self.answers = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        self.closed = True

    def all_reduce(self, x, op, *, out):
        assert op in ("sum", "max")
        out[...] = x

    def plan_all_reduce(self, x, op, *, out):
        return lambda: self.all_reduce(x, op, out=out)

    def barrier(self):
        pass

    def empty(self, shape, dtype):
        return np.empty(shape, dtype)

    def broadcast_object(self, obj, root=0):
        return self.commands.pop(0) if obj is None else obj

    def gather_object(self, obj, root=0):
        self.answers.append(obj)
        return [obj]

    def all_gather_object(self, obj):
        return [obj]


@pytest.fixture
def alone(monkeypatch):
    comm = Alone()
    monkeypatch.setenv("GPUCOLL_RANK", "0")
    monkeypatch.setenv("GPUCOLL_WORLD_SIZE", "1")
    monkeypatch.setitem(vars(gpucoll), "init", lambda **_: comm)
    return comm


def test_every_variant(alone, capfd):
    assert cli.main([*SHORT, "--symmetric", "--plan", "-o", "sum,max"]) == 0
    out = capfd.readouterr().out
    rows = [line.split() for line in out.splitlines() if not line.startswith("#")]
    assert len(rows) == 2 * 3 * 3
    assert [" ".join(row[13:]) for row in rows[:3]] == [
        "gpucoll", "gpucoll symmetric", "gpucoll-plan",
    ]  # fmt: skip
    assert alone.closed


def test_the_hosts_are_counted(alone, monkeypatch, tmp_path):
    monkeypatch.setattr(Alone, "all_gather_object", lambda _, mine: [mine, "b", mine, "c"])
    assert cli.main([*SHORT, "--json", str(tmp_path / "it.json")]) == 0
    assert json.loads((tmp_path / "it.json").read_text("utf-8"))["environment"]["hosts"] == 3


def test_another_number_of_ranks_is_refused(alone, capfd):
    assert cli.main(["--ranks", "4"]) == 2
    assert "the launcher has started 1 ranks" in capfd.readouterr().err


def test_peers_are_refused(alone, capfd):
    assert cli.main(["--compare", "gloo"]) == 2
    assert "run gpucoll-bench --ranks P --compare ... without one" in capfd.readouterr().err


def test_what_starts_ranks_itself_is_refused(alone, capfd):
    assert cli.main([*SHORT, "all_reduce,startup,memory"]) == 2
    assert "startup, memory: the start of ranks is measured" in capfd.readouterr().err


def test_ranks_that_are_there_are_not_put_on_one_cpu(alone, capfd):
    assert cli.main([*SHORT, "--one-cpu"]) == 2
    assert "run gpucoll-bench --ranks P --one-cpu without one" in capfd.readouterr().err


def test_an_error_is_the_exit_code(alone, monkeypatch, capfd):
    monkeypatch.setattr(Alone, "all_reduce", lambda *_, **__: 1 / 0)
    assert cli.main(SHORT) == 1
    assert "gpucoll: rank 0 of 1: ZeroDivisionError" in capfd.readouterr().err
    assert alone.closed


def test_the_other_ranks_follow():
    prepare = {"do": "prepare", "collective": "all_reduce", "dtype": "float32", "redop": "sum",
               "root": 0, "count": 4, "variants": ["private"]}  # fmt: skip
    commands = [
        prepare,
        {"do": "check", "case": "private/in_place"},
        {"do": "single_calls", "case": "private/in_place", "calls": 5},
        {"do": "clock"},
        {"do": "finish"},
    ]
    comm = Alone(commands)
    launched.follow(comm, Own(comm))
    assert comm.commands == []
    *first, calls, clock = comm.answers
    assert first == [{"cases": ["private/out_of_place", "private/in_place"]}, {"wrong": 0}]
    assert len(calls["nanoseconds"]) == 5
    assert min(calls["nanoseconds"]) >= clock["nanoseconds"] / 2 > 0


@pytest.mark.parametrize(
    ("variables", "launched_"),
    [
        ({}, False),
        ({"GPUCOLL_WORLD_SIZE": "2"}, True),
        ({"RANK": "0", "WORLD_SIZE": "2"}, True),
        ({"RANK": "0"}, False),
    ],
)
def test_how_a_launcher_is_recognised(variables, launched_):
    assert cli.under_launcher(variables) is launched_


@pytest.mark.parametrize(("tasks", "launched_"), [("2", True), ("1", False)])
def test_a_shell_that_srun_started_is_no_rank(monkeypatch, tasks, launched_):
    step = {"PROCID": "0", "JOB_ID": "7", "STEP_ID": "0", "STEP_NUM_NODES": "1"}
    for name, value in {**step, "STEP_NUM_TASKS": tasks}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)

    assert cli.under_launcher({}) is launched_
