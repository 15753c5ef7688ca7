"""What an observer must bear: garbage in segments, ranks that come and go, refusals, its end."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from tests.observe.attaching import attach, attach_often, left_over
from tests.observe.jobs import barrier, play
from tests.waiting import until

from gpucoll.group.host import facts
from gpucoll.observe import segments, why
from gpucoll.observe.json_report import Report, as_json
from gpucoll.observe.look import jobs_of, look
from gpucoll.observe.text import lines_of
from gpucoll.observe.verdict import judge
from gpucoll.rendezvous.job import Job
from gpucoll.transport.shared import layout

ODD_WORDS = (0, 1, 2, 3, 255, 1 << 20, 1 << 31, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, -1, -2)
ODD_FACTS: tuple[Any, ...] = (
    -1,
    0,
    3,
    257,
    1 << 31,
    1 << 70,
    1e999,
    float("nan"),
    0.5,
    "",
    None,
    [],
    {},
    True,
)
MOST_KIB = 100 << 10
NOBODY = 65534


def made_segment(draw):
    """Return the descriptor of a segment of three ranks, and its layout."""
    tuning = [*range(1, 9), draw.choice((0, -5, (1 << 31) - 2)), draw.choice((0, 4, 256))]
    place = layout.SegmentLayout(3, layout.Tuning(*tuning), draw.choice((0, 2)))
    fd = os.memfd_create("gpucoll-segment", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, place.size_bytes)
    facts.write_facts(fd, Job(0, 3, "", "", name="made"), place, [os.getpid()] * 3)
    return fd, place


def seal(fd):
    """Seal the size, as gpucoll does."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)


def spoil_words(draw, fd, place, start, end):
    """Write odd words, and bytes, into a part of a segment."""
    for _ in range(draw.randrange(1, 60)):
        offset = draw.randrange(start, end) & ~7
        word = draw.choice(ODD_WORDS) if draw.random() < 0.8 else draw.getrandbits(63)
        os.pwrite(fd, word.to_bytes(8, "little", signed=True), offset)
    if draw.random() < 0.3:
        os.pwrite(fd, draw.randbytes(draw.choice((8, 256, 4096))), draw.randrange(start, end))


def spoil_facts(draw, fd, place):
    """Change the text that describes a segment."""
    size_bytes = int.from_bytes(os.pread(fd, 8, layout.EVENT_FACTS + 8), "little")
    text = os.pread(fd, size_bytes, place.facts)
    given = json.loads(text)
    name = draw.choice([*given])
    way = draw.randrange(5)
    if way == 0:
        given[name] = draw.choice(ODD_FACTS)
    elif way == 1 and isinstance(given[name], list):
        given[name][draw.randrange(len(given[name]))] = draw.choice(ODD_FACTS)
    elif way == 2:
        del given[name]
    text = json.dumps(given).encode()
    if way == 3:
        text = b"[" * (1 << 18)
    elif way == 4:
        text = draw.randbytes(size_bytes)
    os.pwrite(fd, text, place.facts)
    os.pwrite(fd, len(text).to_bytes(8, "little"), layout.EVENT_FACTS + 8)


def spoil(draw, fd, place):
    """Spoil one part of a segment, or all of it."""
    parts = {
        "lines": (place.status_lines, place.cpus),
        "bells": (place.bells, place.opened),
        "records": (place.records, place.slots),
        "slots": (place.slots, place.first_bytes),
        "enqueued": (place.enqueued, place.mailboxes),
        "all": (0, place.first_bytes),
    }
    part = draw.choice([*parts, "facts", "end"])
    if part == "facts":
        spoil_facts(draw, fd, place)
    elif part == "end":
        os.ftruncate(fd, draw.choice((0, 70, place.facts, place.size_bytes - 1)))
    elif parts[part][0] < parts[part][1]:
        spoil_words(draw, fd, place, *parts[part])


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("block", range(20))
def test_garbage_harms_no_observer(block):
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen = 0
    for case in range(100):
        draw = random.Random(f"{block} {case}")
        fd, place = made_segment(draw)
        spoil(draw, fd, place)
        seal(fd)
        found = segments.find([os.getpid()])
        try:
            for job in jobs_of(found.segments):
                told = look(job, 0.0)
                verdict = judge(told, 0.0)
                list(lines_of(told, verdict, {}, tree=True))
                as_json([(Report(told, {}), verdict)])
                seen += 1
        except Exception as error:
            raise AssertionError(f"block {block}, case {case}") from error
        finally:
            found.close()
            os.close(fd)
        if not found.segments:
            assert found.unreadable[os.getpid()]
    assert seen > 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < MOST_KIB


def test_memory_that_can_shrink_is_not_mapped():
    """Its owner could end whoever looks at it: a read behind the end of a file is a SIGBUS."""
    fd, _ = made_segment(random.Random(0))
    try:
        found = segments.find([os.getpid()])
        assert not found.segments
        assert "its size is not sealed" in found.unreadable[os.getpid()]
    finally:
        os.close(fd)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("seed", range(6))
def test_attaching_at_any_moment_changes_nothing(rank_server, tmp_path, seed):
    """Ranks start, work, split, grow, shrink and end; they check what their calls return."""
    attach([os.getpid()])
    before = left_over()
    most = 100 if seed else 10
    *_, attached = attach_often(rank_server, most, seed, tmp_path)
    assert attached >= most
    assert left_over() == before


HANG = [[barrier(), ("mark",), ("sleep", 3600.0)], [barrier(), ("mark",), barrier()]]


@pytest.fixture
def two_ranks(rank_server, tmp_path):
    """The processes of two ranks, of which one waits for the other."""
    marks = tmp_path / "marks"
    marks.write_bytes(b"..")
    with rank_server.fork(2) as pool:
        pool.start(play, HANG, marks, gives="seat")
        until(lambda: marks.read_bytes() == b"!!")
        yield [rank.pid for rank in pool.ranks]
        pool.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(two_ranks):
    pid, (reader, writer) = two_ranks[0], os.pipe()
    child = os.fork()
    if not child:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            code = why.main([str(pid)])
        found = segments.find([pid])
        os.write(writer, json.dumps([code, said.getvalue(), len(found.parts)]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    code, said, n_found = json.loads(os.read(reader, 4096))
    os.close(reader)
    os.close(writer)
    assert (code, n_found) == (why.EXIT_NONE, 0)
    assert said == (
        f"gpucoll why: process {pid} belongs to user 0: the kernel lets that user and root look at "
        f"it, and refuses it to user {NOBODY}\n"
    )


@pytest.mark.soak
def test_a_killed_observer_leaves_nothing(two_ranks):
    """It is killed at moments from its start until it looks again and again."""
    command = [sys.executable, "-m", "gpucoll", "why", str(two_ranks[0]), "--watch"]
    before = [sorted(os.listdir(f"/proc/{pid}/fd")) for pid in two_ranks]
    shared = os.listdir("/dev/shm")
    for place in range(12):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as observer:
            assert observer.stdout is not None
            if place % 2:
                observer.stdout.readline()
            else:
                time.sleep(0.05 * place)
            observer.kill()
        assert observer.returncode == -signal.SIGKILL
    assert [sorted(os.listdir(f"/proc/{pid}/fd")) for pid in two_ranks] == before
    assert os.listdir("/dev/shm") == shared
    assert attach(two_ranks)


def test_the_oldest_communicator_numbers_the_ranks():
    """Whatever the order in which they are found."""
    fds = []
    pids = [os.getpid(), 1, 2]
    for order in (pids, pids[::-1]):
        place = layout.SegmentLayout(3, layout.Tuning(*range(1, 9)))
        fds.append(os.memfd_create("gpucoll-segment", os.MFD_ALLOW_SEALING))
        os.ftruncate(fds[-1], place.size_bytes)
        seal(fds[-1])
        facts.write_facts(fds[-1], Job(0, 3, "", ""), place, order)
    found = segments.find([os.getpid()])
    try:
        for parts in (found.segments, found.segments[::-1]):
            ((first, second),) = jobs_of(parts)
            assert (first.pids, second.pids) == (pids, pids[::-1])
    finally:
        found.close()
        for fd in fds:
            os.close(fd)
