"""What the others are told of a rank that an exception took out of the communicator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gpucoll
from gpucoll.errors import AbortedError, PeerLostError
from gpucoll.group.host.members import shown_reason
from gpucoll.transport.shared.layout import REASON_BYTES


class CannotSayError(Exception):
    def __str__(self):
        raise RuntimeError("no")


def raised_inside(comm, error):
    """Rank 1 raises in its `with` block; return what the others get there."""
    try:
        with comm.duplicate() as inner:
            inner.barrier()
            if comm.rank == 1:
                raise error
            inner.all_reduce(np.ones(3))
    except (PeerLostError, AbortedError) as found:
        return f"{type(found).__name__}: {found}"
    except type(error):
        return ""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("bad value"), "ValueError: bad value. The"),
        (ValueError("First.\nSecond."), "ValueError: First. The"),
        (KeyError("key"), "KeyError: 'key'. The"),
        (RuntimeError(), "RuntimeError. The"),
        (SystemExit(3), "SystemExit: 3. The"),
        (CannotSayError(), "CannotSayError. The"),
    ],
)
def test_what_a_with_block_ended_by(ranks, error, reason):
    for text in ranks.call(3, raised_inside, error)[::2]:
        assert text.startswith("PeerLostError: ")
        assert f"it closed the communicator after call #1, because it raised {reason}" in text


@pytest.mark.parametrize("letter", ["x", "é", "中"])
def test_a_long_message_is_cut(ranks, letter):
    first, _ = ranks.call(2, raised_inside, ValueError(letter * 300))
    reason = first.partition("because it raised ")[2].partition(". The")[0]

    assert reason.strip(".") == "ValueError: " + letter * (len(reason.strip(".")) - 12)
    assert REASON_BYTES - 6 <= len(reason.encode()) + 2 <= REASON_BYTES + 1


def test_a_message_of_the_longest_size(ranks):
    def longest(comm):
        error = ValueError("x" * (REASON_BYTES - 1 - len("ValueError: ")))
        comm._group.note_exception(error)
        return comm._group.members.read_reason(comm.rank) == shown_reason(error)

    assert ranks.call(1, longest) == [True]


def test_one_that_closes_has_raised_nothing(ranks):
    def close(comm):
        inner = comm.duplicate()
        if comm.rank == 1:
            inner.close()
            return ""
        with inner, pytest.raises(PeerLostError) as found:
            inner.barrier()
        return str(found.value)

    assert "it closed the communicator before its first call. The" in ranks.call(2, close)[0]


def test_with_calls_under_way_it_is_an_abort_that_says_so(ranks):
    def leave(comm):
        try:
            with comm.duplicate() as inner:
                if comm.rank == 1:
                    inner.recv(np.empty(1), source=0, async_op=True)
                    raise ValueError("bad value")
                inner.barrier()
        except AbortedError as error:
            return str(error)
        except ValueError:
            return ""

    assert (
        "rank 1 aborted it, because it raised ValueError: bad value. Cl" in ranks.call(2, leave)[0]
    )


def test_what_ended_a_program(tmp_path, rank_server):
    program = tmp_path / "program.py"
    program.write_text(
        "import gpucoll\n"
        "comm = gpucoll.init(timeout_s=60)\n"
        "comm.barrier()\n"
        "if comm.rank == 1:\n"
        "    raise ValueError('bad value')\n"
        "comm.barrier()\n"
    )
    path = str(Path(gpucoll.__file__).parent.parent)
    ended = subprocess.run(
        [sys.executable, "-m", "gpucoll", "run", "-n", "2", str(program)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    assert "after call #1, because it raised ValueError: bad value. The" in ended.stderr
