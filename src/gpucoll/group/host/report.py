"""A report on a failure: what `gpucoll why` would have said when a communicator failed.

One rank of a host writes it, in a process of its own (`gpucoll.observe.report`), and the others
wait meanwhile: their memory, and their stacks, still tell where they were. The first of them
stores when it began and its process number in the event line of a segment. From that word all
ranks know the name of the file.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from gpucoll import config
from gpucoll.codes import Codes
from gpucoll.errors import GpucollError, StateError, UsageError
from gpucoll.group.host.members import Members
from gpucoll.transport.shared.layout import EVENT_REPORT, Abort

__all__ = ["LIMIT_S", "add"]

LIMIT_S: Final = 10.0
"""How much later a rank may raise its error because of the report, in seconds."""
SAME_CAUSE_S: Final = 60
"""Failures of several communicators count as one for this long: the first report shows them all."""
_PAUSE_S = 0.02
_NONE = "No report: "
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1].split(':'); "
    "from gpucoll.observe.report import main; sys.exit(main(sys.argv[2:]))"
)


class State(Codes):
    """How far a report is."""

    WRITING = 1
    WRITTEN = 2
    FAILED = 3


class Claim(NamedTuple):
    """A rank's word that it writes, or has written, a report."""

    begun_s: int
    """Seconds since the epoch."""
    pid: int
    """The process that writes."""
    is_last: bool
    """Whether the communicator broke: it has no later report."""
    state: int

    @classmethod
    def of(cls, word: int) -> Claim:
        """Return the claim that a word stands for."""
        return cls(word >> 25, word >> 3 & 0x3FFFFF, bool(word >> 2 & 1), word & 3)

    @property
    def word(self) -> int:
        """The claim as one word."""
        return self.begun_s << 25 | self.pid << 3 | self.is_last << 2 | self.state

    @property
    def is_recent(self) -> bool:
        """Whether a failure now may have the same cause."""
        return abs(time.time() - self.begun_s) < SAME_CAUSE_S

    @property
    def path(self) -> Path:
        """The file of this report."""
        when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self.begun_s))
        host = "".join(each if each.isalnum() or each in "-." else "_" for each in os.uname()[1])
        name = f"gpucoll-{host}-{when}-{self.pid}.txt"
        return Path(config.variable(config.REPORT_DIR)).absolute() / name


def add(
    error: GpucollError, members: Members, all_members: Callable[[], Sequence[Members]]
) -> None:
    """Append to an error where the report on it is. Write that report, unless another rank does.

    Parameters
    ----------
    error : GpucollError
        What ended a call. There is no report on an error of arguments, on Ctrl-C in a rank, or on
        what this rank's program has ended itself.
    members : Members
        The ranks of the communicator.
    all_members : callable
        Returns those of all communicators of this process.
    """
    if isinstance(error, UsageError):
        return
    try:
        abort = members.abort_word()
        if abort & 0xFF == Abort.INTERRUPTED or _is_own(abort, members.rank):
            return
        places = _places(members, all_members())
        claim, is_mine = _claim(places, is_last=abort != 0)
        if claim.path.name in str(error) or _NONE in str(error):
            return
        trouble = _write(claim, places, str(error)) if is_mine else _wait(claim, places)
    except Exception as problem:  # the error itself is more important
        trouble = f"{type(problem).__name__}: {problem}"
    note = f"{_NONE}{trouble}" if trouble else f"Report: {claim.path}"
    error.args = (f"{str(error).rstrip('.')}. {note}", *error.args[1:])


def _is_own(abort: int, rank: int) -> bool:
    return abort & 0xFFFFFFFF == Abort.REQUESTED | rank << 8


def _places(members: Members, all_members: Sequence[Members]) -> list[Members]:
    """Return the communicator that failed, then the largest one of this process, if it is another.

    Communicators that fail for the same cause thus find the same report.
    """
    mapped = [each for each in all_members if each.segment.is_mapped]
    largest = max(mapped, key=_size, default=members)
    return [members] if largest is members else [members, largest]


def _size(members: Members) -> tuple[int, int]:
    """Return what all ranks order communicators by."""
    return members.world_size, -os.fstat(members.segment_fd).st_ino


def _claim(places: list[Members], is_last: bool) -> tuple[Claim, bool]:
    """Return the claim for the report on a failure, and whether this process is to write it."""
    own, shared = places[0], places[-1]
    before = own.load(EVENT_REPORT)
    claim, is_mine = Claim.of(before), False
    if not claim.is_last and not claim.is_recent:
        found = shared.load(EVENT_REPORT)
        claim = Claim.of(found)
        if not claim.is_recent:
            is_last_of_both = is_last and own is shared
            claim = Claim(int(time.time()), os.getpid(), is_last_of_both, State.WRITING)
            seen = shared.compare_exchange(EVENT_REPORT, found, claim.word)
            is_mine = seen == found
            claim = claim if is_mine else Claim.of(seen)
        if own is shared:
            before = claim.word
    desired = claim._replace(is_last=claim.is_last or is_last).word
    seen = own.compare_exchange(EVENT_REPORT, before, desired)
    known = Claim.of(seen)
    if seen != before and known[:2] != claim[:2]:  # a rank with another largest communicator
        if is_mine:
            shared.store(EVENT_REPORT, seen)
        return known, False
    return claim, is_mine


def _write(claim: Claim, places: list[Members], text: str) -> str:
    """Write the report; return what went wrong, or nothing."""
    state = State.FAILED
    command = [sys.executable, "-c", _PROGRAM, ":".join(map(str, sys.path))]
    command += [str(claim.path), str(os.getpid()), f"{LIMIT_S:g}"]
    try:
        # In a session of its own: the end of this rank, or of the job, does not end it.
        ended = subprocess.run(
            command,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="backslashreplace",
            timeout=LIMIT_S,
            start_new_session=True,
        )
        if ended.returncode == 0:
            state = State.WRITTEN
            return ""
        return (ended.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    except subprocess.TimeoutExpired:
        return f"it took more than {LIMIT_S:g} s"
    finally:
        for members in places:
            with contextlib.suppress(StateError):  # another thread has closed it
                word = members.load(EVENT_REPORT)
                if Claim.of(word)[:2] == claim[:2]:
                    done = Claim.of(word)._replace(state=state).word
                    members.compare_exchange(EVENT_REPORT, word, done)


def _wait(claim: Claim, places: list[Members]) -> str:
    """Wait until another process has written its report; return what went wrong, or nothing."""
    left_s = LIMIT_S + 1 - (time.time() - claim.begun_s)  # it began within that second
    until = time.monotonic() + min(left_s, LIMIT_S)
    while True:
        for members in places:
            found = Claim.of(members.load(EVENT_REPORT))
            if found[:2] == claim[:2] and found.state == State.WRITTEN:
                return ""
            if found[:2] == claim[:2] and found.state == State.FAILED:
                return f"process {claim.pid} could not write it"
        if time.monotonic() > until:
            return "" if claim.path.exists() else f"process {claim.pid} has not written it yet"
        time.sleep(_PAUSE_S)
