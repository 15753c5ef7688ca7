"""The models of `docs/models`, by Spin: the protocol holds, and each way to break it is caught."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODELS = Path(__file__).parents[2] / "docs" / "models"
LIMIT_S = 150
COMPILER = next(filter(shutil.which, ("cc", "gcc", "clang")), None)

pytestmark = [
    pytest.mark.skipif(shutil.which("spin") is None, reason="spin is missing: apt install spin"),
    pytest.mark.skipif(COMPILER is None, reason="a C compiler is missing"),
]

HOLDS = [
    ("calls", "-DKINDS=127 -DODDS=0 -DTURNS=2"),
    ("calls", "-DKINDS=2"),
    ("calls", "-DKINDS=1 -DMESSAGES"),
    ("calls", "-DKINDS=3 -DODDS=0 -DTURNS=2 -DAHEAD=2 -DR=3"),
    ("calls", "-DKINDS=1 -DAHEAD=2 -DR=3"),
    ("mailbox", "-DNO_BELLS"),
    ("mailbox", "-DONE_RING"),
    ("waiting", ""),
    ("shrink", "-DP=2 -DROUNDS=4"),
    ("grow", "-DP=3 -DKILLS=2"),
    ("started", ""),
    ("started", "-DN=3 -DR=2 -DINTERRUPTS=0"),
]
GOES_ON = [("started", "-DN=1"), ("started", "-DN=2 -DINTERRUPTS=0")]
KILLED = [
    ("calls", "-DKINDS=2 -DODDS=0 -DTURNS=2 -DKILL"),
    ("calls", "-DKINDS=2 -DODDS=0 -DTURNS=2 -DKILL -DAHEAD=2 -DR=3"),
]
CAUGHT = [
    ("calls", "-DKINDS=3 -DNO_VERIFY"),
    ("calls", "-DKINDS=3 -DNO_VERIFY -DUNCHECKED"),
    ("calls", "-DKINDS=3 -DLATE_VERIFY"),
    ("calls", "-DKINDS=2 -DODDS=0 -DLATE_VERIFY -DUNCHECKED -DIN_LINE"),
    ("calls", "-DKINDS=3 -DODDS=0 -DTURNS=2 -DAHEAD=2 -DR=3 -DAS_IF_NOT_AHEAD"),
    ("calls", "-DKINDS=3 -DEARLY_POST"),
    ("calls", "-DKINDS=65 -DODDS=0 -DNO_WAIT_ALL_DONE"),
    ("calls", "-DKINDS=3 -DNO_WAIT_FOR_ANSWERS"),
    ("calls", "-DKINDS=1 -DAHEAD=2 -DR=4 -DOWN_SEQUENCE"),
    ("calls", "-DKINDS=3 -DGOES_ON"),
    ("calls", "-DKINDS=1 -DAHEAD=2 -DR=4 -DEVENT_FIRST"),
    ("calls", "-DKINDS=3 -DP=3 -DOWN_SLOTS"),
    ("mailbox", "-DONE_RING -DNO_RING"),
    ("mailbox", "-DONE_RING -DPLAIN_NUMBER"),
    ("mailbox", "-DONE_RING -DLATE_ANNOUNCEMENT"),
    ("mailbox", "-DONE_RING -DNO_SECOND_LOOK"),
    ("mailbox", "-DNO_BELLS -DNUMBER_FIRST"),
    ("mailbox", "-DNO_BELLS -DEARLY_TAIL"),
    ("mailbox", "-DNO_BELLS -DEARLY_REUSE"),
    ("mailbox", "-DNO_BELLS -DNO_CLEARING"),
    ("mailbox", "-DNO_BELLS -DNO_SPARE"),
    ("mailbox", "-DNO_BELLS -DFORGETS_RECORD"),
    ("waiting", "-DPLAIN_STORE"),
    ("waiting", "-DSLEEP_WITHOUT_COMPARING"),
    ("shrink", "-DP=3 -DNOT_SAID"),
    ("grow", "-DP=3 -DEACH_FOR_ITSELF"),
    ("grow", "-DP=2 -DLETS_IN_FIRST"),
    ("started", "-DINTERRUPTS=0 -DWAITS_FOR_WHO_NOTES"),
    ("started", "-DLETS_RUN"),
    ("started", "-DFAILS_WHAT_COMES"),
    ("started", "-DGOES_ON_AFTER_THE_END"),
    ("started", "-DINTERRUPTS=0 -DWAITERS=2 -DBELIEVES_THE_STATUS"),
    ("started", "-DINTERRUPTS=0 -DWAITERS=2 -DN=3 -DR=3 -DNO_LOSS -DSAYS_SO_LATE"),
]
TURNS_FOR_EVER = [("started", "-DN=1 -DLEAVES_TO_WHO_REAPED")]


def check(folder, model, switches, *options, is_long=True, looks_for=("-DSAFETY",)):
    """Explore a model; return how many errors Spin found, and whether it looked everywhere."""
    commands = [
        ["spin", "-a", *switches.split(), str(MODELS / f"{model}.pml")],
        [COMPILER, "-O1" if is_long else "-O0", "-w", *looks_for, "-o", "pan", "pan.c"],
        ["./pan", "-w22" if is_long else "-w18", *options],
    ]
    for command in commands:
        ended = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.search(r"errors: (\d+)", ended.stdout)
    assert found, ended.stdout + ended.stderr
    return int(found[1]), "search depth too small" not in ended.stdout


@pytest.mark.parametrize(("model", "switches"), HOLDS)
def test_the_protocol_holds(tmp_path, model, switches):
    assert check(tmp_path, model, switches, "-m2000000") == (0, True)


@pytest.mark.parametrize(("model", "switches"), KILLED)
def test_nobody_waits_for_ever_for_a_rank_that_is_gone(tmp_path, model, switches):
    # -E: the dead stand where they died, which is no deadlock.
    assert check(tmp_path, model, switches, "-m2000000", "-E") == (0, True)


def turns_for_ever(folder, model, switches):
    """Explore a model for loops that a fair processor never leaves."""
    options = "-l", "-f", "-m2000000"
    return check(folder, model, switches, *options, looks_for=("-DNP", "-DNFAIR=3"))


@pytest.mark.parametrize(("model", "switches"), GOES_ON)
def test_nobody_turns_in_a_loop_for_ever(tmp_path, model, switches):
    assert turns_for_ever(tmp_path, model, switches) == (0, True)


@pytest.mark.parametrize(("model", "switches"), TURNS_FOR_EVER)
def test_a_loop_without_an_end_is_caught(tmp_path, model, switches):
    assert turns_for_ever(tmp_path, model, switches)[0] == 1


@pytest.mark.parametrize(("model", "switches"), CAUGHT)
def test_what_breaks_it_is_caught(tmp_path, model, switches):
    depth = "-m500" if "-DP=3" in switches else "-m200000"  # short ways to the error come first
    errors, _ = check(tmp_path, model, switches, depth, is_long=False)

    assert errors == 1
