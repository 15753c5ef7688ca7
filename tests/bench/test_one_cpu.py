"""Ranks that are put on one CPU after they have met, beside ranks that were bound there before."""

from __future__ import annotations

import pytest

from gpucoll.bench import cli, libraries, starts
from gpucoll.topology import usable_cpus

ARGUMENTS = ["--ranks", "2", "-b", "4", "-e", "4", "-n", "3", "-w", "1", "--rounds", "2"]


def test_on_doubles(on_double, tmp_path, monkeypatch, capfd):
    right_group, right_measure = starts.own_group, cli.measure
    groups: list[tuple[str, list[int]]] = []
    masks: list[list[int]] = []

    def own_group(*arguments):
        store = tmp_path / "store" / f"group{len(groups)}"
        monkeypatch.setenv("BENCH_DOUBLE_STORE", str(store))
        group = right_group(*arguments)
        groups.append((group.name, arguments[1]))
        return group

    def measure(options, own, peers, *more):
        for group in (own, *peers):
            masks.extend(one["cpus"] for one in group.call("describe", 10.0))
        return right_measure(options, own, peers, *more)

    monkeypatch.setattr(libraries, "own_group", own_group)
    monkeypatch.setattr(cli, "measure", measure)
    assert cli.main([*ARGUMENTS, "--one-cpu"]) == 0
    cpu = min(usable_cpus())
    assert groups == [("gpucoll", []), ("gpucoll-bound", [cpu, cpu])]
    assert masks == [[cpu]] * 4
    out = capfd.readouterr().out
    assert out.count(" gpucoll / gpucoll-bound ") == 1
    assert f"pinned in rank order to CPUs {cpu}, {cpu}" in out


@pytest.mark.soak
def test_on_gpucoll(capfd):
    assert cli.main(["all_reduce", *ARGUMENTS, "--one-cpu"]) == 0
    assert " gpucoll / gpucoll-bound " in capfd.readouterr().out
