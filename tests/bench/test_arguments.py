from __future__ import annotations

import pytest

from gpucoll.bench.argument_types import size, sizes
from gpucoll.bench.arguments import parse
from gpucoll.bench.collectives import COLLECTIVES
from gpucoll.bench.measure import seconds_of_samples, single_calls
from gpucoll.bench.other_names import OTHER_NAMES, explained
from gpucoll.bench.patterns import MEASURED, PATTERNS


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("4", 4),
        ("1K", 1024),
        ("1k", 1024),
        ("64M", 64 << 20),
        ("64MB", 64 << 20),
        ("64MiB", 64 << 20),
        ("1G", 1 << 30),
        ("1.5K", 1536),
    ],
)
def test_sizes_are_powers_of_1024(text, bytes_):
    assert size(text) == bytes_


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-b", "0"], "not a size"),
        (["-b", "-4"], "not a size"),
        (["-b", "4X"], "not a size"),
        (["-b", "1.5"], "not a size"),
        (["-b", "8K", "-e", "4K"], "smaller than -b"),
        (["-f", "1"], "above 1"),
        (["-f", "nan"], "above 1"),
        (["-f", "2", "-i", "4"], "not allowed with"),
        (["--ranks", "0"], "at least 1"),
        (["--ranks", "two"], "whole number"),
        (["--rank=2"], "unrecognized arguments: --rank=2"),
        (["-n", "0"], "at least 1"),
        (["-w", "-1"], "at least 0"),
        (["-d", "float31"], "'float31' is unknown: did you mean float32?"),
        (["-o", "mean"], "'mean' is unknown; known are"),
        (["-d", "float32", "-o", "bxor"], "not defined on"),
        (["-d", "complex64", "-o", "min,max"], "not defined on"),
        (["all_gadder"], "'all_gadder' is unknown: did you mean all_gather?"),
        (["all_reduce,all_gadder"], "'all_gadder' is unknown: did you mean all_gather?"),
        (["allreduce"], "did you mean all_reduce?"),
        (["bcast"], "did you mean broadcast?"),
        (["osu_latenzy"], "did you mean osu_latency?"),
        (["everything"], "'everything' is unknown; known are all_reduce, reduce, "),
        (["scan", "-o", "avg"], "scan: -o avg is not defined on"),
        (["gather", "--limit"], "--limit: no memory limit is known for gather"),
        (["gather", "--list", "5"], "--list is for all_reduce and broadcast, not for gather"),
        (["all_reduce", "--list", "1"], "at least 2"),
        (["all_reduce", "--list", "5", "--plan"], "leave --symmetric, --plan, --limit and --torch"),
        (["all_reduce", "--list", "5", "--torch"], "--plan, --limit and --torch out"),
        (["async_all_reduce", "--list", "5"], "--list is for all_reduce and broadcast, not for"),
        (["async_all_reduce", "--plan"], "async_all_reduce has no plan"),
        (["overlap", "--limit"], "no memory limit is known for overlap"),
        (["startup,producer_consumer", "--symmetric"], "has no arrays"),
        (["barrier,startup", "--torch"], "--torch: barrier, startup is not measured with tensors"),
        (["broadcast_object", "--torch"], "is not measured with tensors"),
        (["--torch", "--array", "torch"], "--torch measures PyTorch's tensors on the host"),
        (["memory,all_reduce", "--array", "cupy"], "memory can only be measured on the host"),
        (["overlap", "--work", "0"], "above 0"),
        (["--one-cpu", "--unpinned"], "give only one of them"),
        (["--one-cpu", "--array", "cupy"], "--one-cpu supports only host arrays"),
        (["barrier,startup", "--one-cpu"], "--one-cpu: startup cannot be bound"),
        (["everything"], "(or for several of them all, async, patterns)"),
        (["-d", "any"], "(or all for all of them)"),
        (["stream,ping_pong", "--plan"], "stream, ping_pong has no plan"),
        (["--sample", "0"], "above 0"),
        (["barrier", "--symmetric"], "has no arrays"),
        (["barrier", "--plan"], "has no plan"),
        (["broadcast", "--ranks", "2", "-r", "2"], "one of the 2 ranks"),
        (["--compare", "lammpi"], "'lammpi' is unknown; known are"),
        (["--compare", "mpich="], "must follow the equals sign"),
        (["--compare", "mpich,mpich"], "twice"),
        (["--timeout", "0"], "above 0"),
        (["--percentiles", "--array", "cupy"], "but a call on a GPU only enqueues work"),
        (["startup,producer_consumer", "--percentiles"], "producer_consumer has no single calls"),
        (["--json", "x", "--csv", "x"], "--json and --csv name the same file: x"),
        (["--html", "x", "--json", "x"], "--json and --html name the same file: x"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_nothing_said_means_all_reduce_of_float32_sums():
    options = parse([])
    assert options.collective == "all_reduce"
    assert options.sizes_bytes == tuple(4 * 4**i for i in range(13))
    assert options.combinations == (("float32", "sum"),)
    assert options.variants == ["private"]
    assert (options.ranks, options.reps, options.warmup, options.rounds) == (None, None, None, 9)


def test_everything_said():
    line = (
        "all_reduce --ranks 4 -b 1K -e 4K -i 1K -d half,bfloat16 -o sum,max -n 7 -w 0 --rounds 3 "
        "--symmetric --plan --limit --compare mpich=/m/bin/python,gloo -c 0"
    )
    options = parse(line.split())
    assert options.sizes_bytes == (1024, 2048, 3072, 4096)
    assert options.combinations == (
        ("float16", "sum"),
        ("float16", "max"),
        ("bfloat16", "sum"),
        ("bfloat16", "max"),
    )
    assert options.variants == ["private", "symmetric", "plan", "limit"]
    assert options.compare == {"mpich": "/m/bin/python", "gloo": None}
    assert (options.reps, options.warmup, options.check) == (7, 0, False)


def test_all_leaves_out_what_is_not_defined():
    combinations = parse(["-d", "all", "-o", "all"]).combinations
    assert ("int8", "bxor") in combinations
    assert ("bool", "land") in combinations
    assert ("float32", "band") not in combinations
    assert ("complex64", "min") not in combinations
    assert ("bool", "avg") not in combinations


def test_what_a_collective_does_not_take_is_not_asked_for():
    assert parse(["broadcast", "-o", "max"]).combinations == (("float32", "none"),)
    barrier = parse(["barrier"])
    assert (barrier.combinations, barrier.sizes_bytes) == ((("none", "none"),), (0,))


def test_several_collectives_each_with_what_it_takes():
    options = parse(["all", "--symmetric", "--plan", "--limit", "-o", "max,avg", "-r", "1"])
    each = {one.collective: one for one in options.each()}
    assert list(each) == list(COLLECTIVES)
    assert each["all_reduce"].variants == ["private", "symmetric", "plan", "limit"]
    assert each["gather"].variants == ["private", "symmetric", "plan"]
    assert each["stream"].variants == ["private", "symmetric"]
    assert each["barrier"].variants == ["private"]
    assert each["barrier"].sizes_bytes == (0,)
    assert each["reduce"].combinations == (("float32", "max"), ("float32", "avg"))
    assert each["scan"].combinations == (("float32", "max"),)
    assert [one.collective for one in parse(["scan,gather,scan"]).each()] == ["scan", "gather"]


def test_patterns_by_name_and_all_of_them():
    assert set(MEASURED) == {*COLLECTIVES, *PATTERNS}
    every = parse(["all,async,patterns,gather"])
    assert set(every.collectives) == set(MEASURED)
    assert len(every.collectives) == len(MEASURED)
    asynchronous = parse(["async"]).collectives
    assert asynchronous[:2] == ("async_all_reduce", "async_reduce")
    assert not {"async_barrier", "async_stream", "overlap"} & {*asynchronous}


def test_what_a_pattern_has_and_has_not():
    options = parse(["patterns", "--symmetric", "--torch", "-o", "max", "--work", "0.5"])
    each = {one.collective: one for one in options.each()}
    assert options.work_s == 0.0005
    assert each["async_scan"].variants == ["private", "symmetric", "torch"]
    assert each["async_scan"].combinations == (("float32", "max"),)
    assert each["overlap"].variants == ["private", "blocking", "work", "symmetric"]
    assert each["overlap"].peer_variants == ["private", "blocking", "work"]
    assert each["isend_irecv"].variants == ["private", "symmetric", "torch"]
    assert each["recv_unknown"].variants == ["private", "symmetric"]
    for name in ("producer_consumer", "startup", "memory"):
        assert each[name].variants == ["private"]
        assert (each[name].sizes_bytes, each[name].combinations) == ((0,), (("none", "none"),))


def test_ranks_are_pinned_if_nothing_else_is_said():
    assert parse([]).pinned
    assert not parse(["--unpinned"]).pinned


def test_a_list_is_measured_in_one_call_and_in_many():
    options = parse(["all_reduce,broadcast", "--list", "500"])
    assert [one.variants for one in options.each()] == [["private", "fused"]] * 2
    assert options.list_length == 500


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((4, 64, 4.0, None), (4, 16, 64)),
        ((4, 63, 4.0, None), (4, 16)),
        ((1, 4, 1.5, None), (1, 2, 3, 4)),
        ((8, 8, 2.0, None), (8,)),
        ((4, 13, 2.0, 4), (4, 8, 12)),
    ],
)
def test_steps(arguments, expected):
    assert sizes(*arguments) == expected


def test_names_of_other_benchmarks():
    options = parse(["osu_allgather,all_reduce,all_reduce_perf,osu_iallgather"])
    assert options.collectives == ("all_gather", "all_reduce", "async_all_gather")
    assert options.other_names == ("osu_allgather", "all_reduce_perf", "osu_iallgather")
    first, second, third, osu, nccl = explained(options.other_names, 4)
    assert first.startswith("osu_allgather is all_gather here; OSU's SIZE is one rank's block")
    assert first.endswith("use 4 times OSU's.")
    assert second == "all_reduce_perf is all_reduce here."
    assert "pure communication" in third
    assert third.endswith("use 4 times OSU's.")
    assert osu.startswith("OSU times each call alone")
    assert nccl.startswith("Sizes and bandwidths are nccl-tests'.")
    assert not list(explained([], 4))


def test_every_other_name_is_measured_here():
    assert {one.collective for one in OTHER_NAMES.values()} <= {*MEASURED}
    assert not {*OTHER_NAMES} & {*MEASURED}
    # sizes differ if OSU's is a block's, except for the input of reduce_scatter
    for name, one in OTHER_NAMES.items():
        in_blocks = MEASURED[one.collective].in_blocks and "reduce_scatter" not in name
        assert ("{ranks}" in one.differs) is (in_blocks and one.benchmark == "OSU")


@pytest.mark.parametrize(
    ("call_s", "calls"),
    [(1e-6, 9000), (50e-6, 2700), (1e-3, 200), (10e-3, 200), (10.1e-3, 0), (1.0, 0)],
)
def test_single_calls_are_enough_or_none(call_s, calls):
    options = parse(["--percentiles"])
    assert single_calls(options, call_s) == calls
    samples_s = seconds_of_samples(parse([]), call_s)
    assert seconds_of_samples(options, call_s) == pytest.approx(samples_s + calls * call_s)


@pytest.mark.parametrize(
    "arguments", [["gather,scan"], ["gather", "scan", "gather"], ["gather, scan"], ["gather,scan,"]]
)
def test_several_names(arguments):
    assert parse(arguments).collectives == ("gather", "scan")


def test_a_first_size_above_the_usual_last_one():
    assert parse(["-b", "128M"]).sizes_bytes == (128 << 20,)
