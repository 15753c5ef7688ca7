"""The table of thresholds: what it holds for however many ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpucoll.backends.choice import Seen
from gpucoll.backends.cpu.host import tuning as cpu_tuning
from gpucoll.backends.cpu.host.tuning import TWO_ON_ZEN_4, TWO_ON_ZEN_5, WISH, tune
from gpucoll.errors import ArgumentError
from gpucoll.kernels.cpu import addresses
from gpucoll.kernels.cpu.cache_key import processor
from gpucoll.transport.shared import MAX_RANKS
from gpucoll.transport.shared.layout import SegmentLayout
from gpucoll.transport.shared.words import Context

ELSEWHERE = {
    "single_copy_min_bytes": 64 << 10,
    "root_copy_min_bytes": 0,
    "string_copies": 0,
    "fetched_min_bytes": 0,
    "streamed_bytes": 256 << 10,
    "n_stages": 3,
    "nontemporal_fills": 0,
}
MEASURED = {
    "AMD, Zen 5": {**ELSEWHERE, **TWO_ON_ZEN_5},
    "AMD, Zen 4": {**ELSEWHERE, **TWO_ON_ZEN_4},
}
PROCESSORS = {
    "AMD, Zen 5": ("AuthenticAMD", 26, "AMD EPYC"),
    "AMD, Zen 4": ("AuthenticAMD", 25, "AMD EPYC"),
    "Hygon": ("HygonGenuine", 24, "Hygon C86 7185"),
    "Intel": ("GenuineIntel", 6, "Intel(R) Xeon(R) Processor"),
    "Intel, of that family": ("GenuineIntel", 26, "Intel(R) Xeon(R) Processor"),
}


def introductions_of(world_size, n_cpus):
    """Return what ranks that may use a CPU each, while there are some, say of themselves."""
    return [
        {"cpus": [rank % n_cpus], "gpu": [*Seen("", "none")], "same": {WISH: "auto"}}
        for rank in range(world_size)
    ]


@pytest.fixture
def on(monkeypatch, tmp_path):
    """Return what has the table made as on a processor of `PROCESSORS`."""

    def put(name):
        vendor, family, model_name = PROCESSORS[name]
        cpuinfo = tmp_path / "cpuinfo"
        one = f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 2\n"
        cpuinfo.write_text(2 * (f"processor\t: 0\n{one}model name\t: {model_name}\n\n"))
        monkeypatch.setattr(cpu_tuning, "processor", lambda: processor(Path(cpuinfo)))

    monkeypatch.delenv("GPUCOLL_CPU_TUNING", raising=False)
    return put


def values(tuning, names):
    return {name: getattr(tuning, name) for name in names}


@pytest.mark.parametrize("cpus_a_rank", [0, 1])
def test_every_number_of_ranks_has_a_table(cpus_a_rank):
    """Each threshold is one that the layout takes; 150 ranks had none."""
    for world_size in range(1, MAX_RANKS + 1):
        tuning = tune(introductions_of(world_size, world_size if cpus_a_rank else 1))
        assert tuning.rooted_bytes % 64 == 0
        assert SegmentLayout(world_size, tuning).size_bytes > 0


@pytest.mark.parametrize("name", PROCESSORS)
def test_only_processors_that_were_measured_have_other_values(on, name):
    on(name)

    assert values(tune(introductions_of(2, 2)), ELSEWHERE) == MEASURED.get(name, ELSEWHERE)


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize(("world_size", "n_cpus"), [(1, 2), (2, 1), (3, 3), (4, 2), (16, 16)])
def test_so_have_only_two_ranks_with_a_cpu_each(on, name, world_size, n_cpus):
    on(name)

    assert values(tune(introductions_of(world_size, n_cpus)), ELSEWHERE) == ELSEWHERE


def test_the_environment_has_the_last_word(on, monkeypatch):
    for name, asked in (("AMD, Zen 4", ELSEWHERE), ("Intel", MEASURED["AMD, Zen 5"])):
        on(name)
        text = ",".join(f"{field}={value}" for field, value in asked.items())
        monkeypatch.setenv("GPUCOLL_CPU_TUNING", text)
        assert values(tune(introductions_of(2, 2)), ELSEWHERE) == asked


def test_a_bound_that_is_asked_for_holds_for_roots_too(on, monkeypatch):
    on("AMD, Zen 5")
    monkeypatch.setenv("GPUCOLL_CPU_TUNING", "single_copy_min_bytes=5000")
    changed = {"single_copy_min_bytes": 5000, "root_copy_min_bytes": 0}
    expected = {**MEASURED["AMD, Zen 5"], **changed}

    assert values(tune(introductions_of(2, 2)), ELSEWHERE) == expected


def test_string_copies_are_there_or_not(on, monkeypatch):
    on("Intel")
    monkeypatch.setenv("GPUCOLL_CPU_TUNING", "string_copies=2")
    with pytest.raises(ArgumentError, match=r"string_copies must be in 0\.\.1; got 2"):
        tune(introductions_of(2, 2))


@pytest.mark.parametrize("value", ["n_stages=2", "streamed_bytes=262143", "nontemporal_fills=3"])
def test_values_that_a_segment_cannot_have(on, monkeypatch, value):
    on("Intel")
    monkeypatch.setenv("GPUCOLL_CPU_TUNING", value)
    with pytest.raises(ArgumentError, match=rf"{value.split('=')[0]} must be in \d+\.\."):
        tune(introductions_of(2, 2))


def kernels_in_use(comm):
    """Return the words of the table, and whether each way between ranks is the string copy."""
    context, string_copy = comm._group.context, addresses.string_copy_kernel()
    ways = {
        name: int(context[way]) == string_copy
        for name, way in Context.fields.items()
        if name.startswith("copy_")
    }
    return comm._group.members.tuning.words(), ways


@pytest.mark.skipif(not addresses.HAS_STRING_COPY, reason="an instruction of x86-64")
@pytest.mark.parametrize("asked", [0, 1])
def test_every_rank_takes_the_kernels_that_rank_0_chose(ranks, asked):
    environment = {"GPUCOLL_CPU_TUNING": f"string_copies={asked}"}
    replies = ranks.call(3, kernels_in_use, environment=environment)

    assert len({words for words, _ in replies}) == 1
    for _, ways in replies:
        changed = {name for name, is_string_copy in ways.items() if is_string_copy}
        assert changed == ({"copy_posted", "copy_exchanged"} if asked else set())
