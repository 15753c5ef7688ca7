"""``python tools/schedules``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from schedules import arguments
from schedules.cli import main
from schedules.printing import size_text, time_text

ROOT = Path(__file__).resolve().parents[3]


def printed(capsys, *words):
    """Return the lines of stdout of a command that succeeds."""
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def test_as_a_command_of_python():
    command = [sys.executable, str(ROOT / "tools" / "schedules"), "all_reduce", "--hosts", "2"]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    assert ended.stdout.splitlines()[:9] == [
        "all_reduce of 1 MiB, 2 hosts: ring",
        "working buffer: 2 blocks of 512 KiB",
        "",
        "rank 0 of 2",
        "step  sends    to               receives  from",
        "   0  block 1   1               block 0      1  reduces",
        "   1  block 0   1  as it comes  block 1      1  replaces",
        "2 steps, 1 MiB sent, 1 MiB received, 1 link",
        "",
    ]
    assert ended.stderr == ""


def test_prices_of_all_algorithms(capsys):
    lines = printed(capsys, "all_reduce", "--hosts", "4", "--latency-us", "0", "--gbit-s", "8")

    assert [line.split() for line in lines[-4:]] == [
        ["ring", "6", "1.5", "MiB", "1.5", "MiB", "2", "1.573", "ms"],
        ["recursive_doubling", "2", "2", "MiB", "2", "MiB", "2", "2.097", "ms"],
        ["halving_doubling", "4", "1.5", "MiB", "1.5", "MiB", "2", "1.573", "ms"],
        ["chain", "4", "2", "MiB", "2", "MiB", "2", "2.294", "ms"],
    ]


@pytest.mark.parametrize(
    ("words", "title"),
    [
        (["all_reduce"], "all_reduce of 1 MiB, 4 hosts: ring"),
        (["all_reduce", "--bytes", "8"], "all_reduce of 8 B, 4 hosts: recursive_doubling"),
        (["all_reduce", "--ordered"], "all_reduce of 1 MiB, 4 hosts: chain"),
        (["all_reduce", "--not-commutative"], "all_reduce of 1 MiB, 4 hosts: halving_doubling"),
        (
            ["reduce", "--root", "3", "--algorithm", "chain"],
            "reduce of 1 MiB, 4 hosts, root 3: chain",
        ),
        (["barrier", "--hosts", "1"], "barrier, 1 host: dissemination"),
        (
            ["all_gather", "--hosts", "3", "--ranks-per-host", "2", "--bytes", "1.5KB"],
            "all_gather of 1.465 KiB, 3 hosts of 2 ranks: bruck",
        ),
    ],
)
def test_what_is_chosen(capsys, words, title):
    assert printed(capsys, *words)[0] == title


def test_one_rank(capsys):
    lines = printed(capsys, "broadcast", "--hosts", "3", "--rank", "2", "--bytes", "100")

    assert [line for line in lines if line.startswith("rank")] == ["rank 2 of 3"]
    assert "1 step, 0 B sent, 100 B received, 1 link" in lines


def test_of_many_hosts_only_rank_0_and_its_algorithm(capsys):
    lines = printed(capsys, "all_reduce", "--hosts", "1000", "--bytes", "1KiB")

    assert [line for line in lines if line.startswith("rank")] == ["rank 0 of 1000"]
    assert lines[-1].split()[0] == "recursive_doubling"
    assert "ring" not in "".join(lines)


def test_alone(capsys):
    assert "rank 0 of 1: nothing to do" in printed(capsys, "scan", "--hosts", "1")


def test_several_ranks_a_host(capsys):
    lines = printed(capsys, "all_reduce", "--ranks-per-host", "2", "--inside-latency-us", "100000")

    assert lines[1] == "working buffer: 4 blocks of 256 KiB"
    assert lines[-1].startswith("ring: 100.2 ms inside hosts, 12.6")
    assert lines[-1].endswith(" ms between them, 100.2 ms inside again")


def test_a_drawing(capsys, tmp_path):
    picture = tmp_path / "ring.svg"

    lines = printed(capsys, "all_reduce", "--svg", str(picture))

    assert lines[-1] == f"drawn: {picture}"
    assert ElementTree.fromstring(picture.read_text("utf-8")).tag.endswith("svg")


def test_a_drawing_with_a_root(capsys, tmp_path):
    drawn = []
    for root in (0, 3):
        printed(capsys, "broadcast", "--root", str(root), "--svg", str(tmp_path / "tree.svg"))
        drawn.append((tmp_path / "tree.svg").read_text("utf-8"))

    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["all_reduce", "--algorithm", "tree"], "no algorithm 'tree' for all_reduce: there are "),
        (["all_reduce", "--hosts", "17", "--svg", "x.svg"], "a drawing of 17 hosts: at most 16"),
        (["all_reduce", "--svg", "/no/such/folder/x.svg"], "/no/such/folder/x.svg"),
    ],
)
def test_what_cannot_be_done(capsys, words, message):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("python tools/schedules: ")
    assert message in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required: COLLECTIVE"),
        (["send"], "invalid choice: 'send'"),
        (["barrier", "--hosts", "0"], "--hosts: '0': a whole number from 1 to 1024"),
        (["barrier", "--hosts", "5000"], "--hosts: '5000': a whole number from 1 to 1024"),
        (["barrier", "--hosts", "four"], "--hosts: 'four': a whole number"),
        (["barrier", "--rank", "4"], "--rank 4: with 4 hosts, 0 to 3"),
        (["reduce", "--root", "9"], "--root 9: with 4 hosts, 0 to 3"),
        (["reduce", "--root", "-1"], "'-1': a whole number from 0 to 1023"),
        (["reduce", "--bytes", "1 cup"], "'1 cup' is no size: 1000, 32KiB, 1MiB or 1GiB are"),
        (["reduce", "--bytes", "-5"], "'-5' is no size"),
        (["reduce", "--gbit-s", "0"], "--gbit-s: '0': a number above 0 is needed"),
        (["reduce", "--gbit-s", "nan"], "--gbit-s: 'nan': a number above 0 is needed"),
        (["reduce", "--latency-us", "-1"], "'-1': a number from 0 on is needed"),
    ],
)
def test_wrong_arguments(capsys, words, message):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("17", 17),
        ("32KiB", 32768),
        ("1 MiB", 1 << 20),
        ("1.5k", 1536),
        ("2GB", 2 * 10**9),
    ],
)
def test_sizes_are_read(text, size_bytes):
    assert arguments.size_in_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 50, "1024 TiB")]
)
def test_sizes_are_written(size_bytes, text):
    assert size_text(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 us"), (25e-6, "25 us"), (0.0127, "12.7 ms"), (2.5, "2.5 s")]
)
def test_times_are_written(seconds, text):
    assert time_text(seconds) == text
