"""What happened: the records and words in the segment, turned into errors that say it."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gpucoll import config
from gpucoll.errors import (
    AbortedError,
    DeadlineError,
    GpucollError,
    MismatchError,
    PeerLostError,
)
from gpucoll.group.host import reasons
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.layout import Abort, Record
from gpucoll.transport.shared.words import Context, Kind
from gpucoll.types import COMPRESSIONS, WITH_COUNTS, Collective, dtype_name, operation_name

if TYPE_CHECKING:
    from gpucoll.group.host.group import HostGroup
    from gpucoll.group.host.members import Members


def difference(left: int, right: int) -> int:
    """Return ``left - right`` of two 32-bit sequence numbers that may have wrapped."""
    return int(struct.unpack("<i", struct.pack("<I", (left - right) & 0xFFFFFFFF))[0])


def list_ranks(ranks: list[int]) -> str:
    """Return "rank 2" or "ranks 1, 2"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def describe_call(members: Members, rank: int, sequence: int) -> str | None:
    """Return what a rank called under this sequence number; None where it has no record of it."""
    with members.held():
        members.header_word(rank, sequence)  # where that is there, so is the record behind it
        return describe_record(members.record_words(rank, sequence), sequence)


def describe_enqueued(members: Members, rank: int, sequence: int) -> str | None:
    """Return the same of a call on GPU arrays."""
    with members.held():
        if difference(members.enqueued_header(rank, sequence) & 0xFFFFFFFF, sequence) != 0:
            return None
        return describe_record(members.enqueued_words(rank, sequence), sequence)


def describe_record(words: npt.NDArray[np.int64], sequence: int) -> str | None:
    """Return a recorded call as its user would write it; None where the record is another's."""
    record = [int(word) for word in words]
    if difference(record[Record.SEQUENCE], sequence) != 0 or not record[Record.COLLECTIVE]:
        return None
    parts = []
    if operation := operation_name(record[Record.OPERATION], record[Record.PARAMETER]):
        parts.append(f"op={operation}")
    if dtype := dtype_name(record[Record.DTYPE]):
        n_dimensions = record[Record.DIMENSIONS]
        shown = min(n_dimensions, layout.SHOWN_DIMENSIONS)
        shape = record[Record.DIMENSION : Record.DIMENSION + shown]
        dots = ", ..." if n_dimensions > shown else ""
        comma = "," if n_dimensions == 1 else ""
        parts.append(f"{dtype}, shape ({', '.join(map(str, shape))}{comma}{dots})")
    collective = Collective(record[Record.COLLECTIVE])
    if collective == Collective.COMPRESSED_ALL_REDUCE:
        parts.append(f"compression={COMPRESSIONS[record[Record.PARAMETER]]}")
        collective = Collective.ALL_REDUCE
    if n_counts := record[Record.N_COUNTS]:
        counts = record[Record.COUNTS : Record.COUNTS + min(n_counts, layout.SHOWN_COUNTS)]
        dots = ", ..." if n_counts > layout.SHOWN_COUNTS else ""
        parts.append(f"counts=[{', '.join(map(str, counts))}{dots}]")
    if record[Record.ROOT] >= 0:
        parts.append(f"root={record[Record.ROOT]}")
    return f"{collective.spelled}({', '.join(parts)})"


def _own_call(group: HostGroup, sequence: int) -> str:
    return describe_call(group.members, group.rank, sequence) or "its next call"


def _who(group: HostGroup) -> str:
    return f"rank {group.rank} of {group.world_size}"


def mismatch_error(group: HostGroup, sequence: int) -> MismatchError:
    """Say which ranks called what under this sequence number, the odd ones first."""
    by_call: dict[tuple[str, int], list[int]] = defaultdict(list)
    for rank in range(group.world_size):
        word = group.members.header_word(rank, sequence)
        called = describe_call(group.members, rank, sequence) or "nothing yet, or something since"
        is_there = difference(word & 0xFFFFFFFF, sequence) == 0
        # By digest too: a fifth dimension is not in the record.
        by_call[called, word >> 32 if is_there else 0].append(rank)
    groups = sorted(by_call.items(), key=lambda item: len(item[1]))
    calls = "; ".join(f"{list_ranks(ranks)} called {called}" for (called, _), ranks in groups)
    early = ("broadcast(", "scatter(")  # small ones: see `leave_unverified`
    is_early = any(called.startswith(early) for called, _ in by_call)
    written = "Outputs are undefined" if is_early else "Nothing was written"
    return MismatchError(
        f"the ranks did not make the same call (#{sequence}): {calls}. This is {_who(group)}. "
        f"{written}; make the same calls in the same order on every rank{_counts_hint(by_call)}. "
        "The communicator stays usable"
    )


def _counts_hint(by_call: Mapping[tuple[str, int], object]) -> str:
    """Say that there are counts, where ranks may have meant blocks of different sizes."""
    names = {called.partition("(")[0] for called, _ in by_call}
    if len(names) != 1 or not names <= {collective.spelled for collective in WITH_COUNTS}:
        return ""
    if names == {Collective.ALL_TO_ALL.spelled}:
        return " (send_counts and recv_counts must agree between each two ranks)"
    return " (blocks of different sizes need counts=, the same on every rank)"


def late_ranks(group: HostGroup, gave_up: int, sequence: int) -> str:
    """Say which ranks the one that gave up was waiting for."""
    members = group.members
    others = [rank for rank in range(group.world_size) if rank != gave_up]
    missing = [
        rank
        for rank in others
        if difference(members.header_word(rank, sequence) & 0xFFFFFFFF, sequence) < 0
    ]
    if missing:
        return f"{list_ranks(missing)} had not arrived"
    unfinished = [
        rank for rank in others if difference(_done_word(members, rank) & 0xFFFFFFFF, sequence) < 0
    ]
    return f"all had arrived, but {list_ranks(unfinished or others)} had not finished"


def _done_word(members: Members, rank: int) -> int:
    """Return {the last call that a rank has finished, its waiters}."""
    return members.load(members.status_offset(rank) + layout.STATUS_DONE)


def deadline_error(group: HostGroup, gave_up: int, sequence: int) -> DeadlineError:
    """Say which rank gave up, in which call, and who was late."""
    called = describe_call(group.members, gave_up, sequence) or "a call"
    if group.rank == gave_up:
        seconds = int(group.context[Context.TIMEOUT_NS]) / 1e9
        start = f"{_who(group)} waited {seconds:g} s in {called} (#{sequence})"
    else:
        start = f"{_who(group)}: rank {gave_up} gave up waiting in {called} (#{sequence})"
    return DeadlineError(
        f"{start}: {late_ranks(group, gave_up, sequence)}. Is a rank stopped, very slow, or in "
        "another part of the program? Give a longer timeout_s if the work is uneven. The "
        "communicator is broken: close it"
    )


def lost_error(group: HostGroup, lost: int, sequence: int) -> PeerLostError:
    """Say which rank is gone, and how it went."""
    status = group.members.status_offset(lost)
    last = group.members.load(status + layout.STATUS_CLOSED_SEQUENCE)
    how = _how_it_went(group, lost, f" after call #{last}")
    return PeerLostError(
        f"{_who(group)} lost rank {lost} in {_own_call(group, sequence)} (#{sequence}): {how}. "
        "The communicator is broken: close it"
    )


def _describe_message(members: Members, rank: int) -> str:
    """Return what a rank last sent, received or looked for, as a call."""
    with members.held():
        words = members.bell_words(rank)[layout.BELL_DOING // 8 :]
        kind, peer, tag, size_bytes, dtype = (int(word) for word in words[:5])
    who = "ANY_SOURCE" if peer < 0 else str(peer)
    what = "ANY_TAG" if tag < 0 else str(tag)
    size = f"{dtype_name(dtype)}, {size_bytes} bytes, " if kind != Kind.PROBE else ""
    end = "dest" if kind == Kind.SEND else "source"
    name = Kind(kind).name.lower()
    if kind == Kind.PROBE:  # a recv that is told neither out nor shape looks first
        name = "recv or probe"
    return f"{name}({size}{end}={who}, tag={what})"


def _message_deadline_error(group: HostGroup, gave_up: int) -> DeadlineError:
    """Say which rank gave up a message."""
    called = _describe_message(group.members, gave_up)
    seconds = int(group.context[Context.TIMEOUT_NS]) / 1e9
    who = f"{_who(group)} waited {seconds:g} s"
    if group.rank != gave_up:
        who = f"{_who(group)}: rank {gave_up} gave up waiting"
    why = "nobody had received it" if called.startswith("send") else "no such message had come"
    return DeadlineError(
        f"{who} in {called}: {why}. Is the other rank in another call, or are sends and receives "
        "in an order in which each waits for the other? send_recv and group() cannot. The "
        "communicator is broken: close it"
    )


ENQUEUED = (
    Abort.ENQUEUED_MISMATCH,
    Abort.ENQUEUED_DEADLINE,
    Abort.ENQUEUED_LOST,
    Abort.BACKEND,
)
"""Abort codes whose sequence number is one of the calls on GPU arrays."""


def enqueued_error(
    group: HostGroup, code: Abort, rank: int, sequence: int, waited_s: float | None = None
) -> GpucollError:
    """Return the error for what a call on GPU arrays met."""
    who, members = _who(group), group.members
    called = f"{describe_enqueued(members, rank, sequence) or 'a call on GPU arrays'} (#{sequence})"
    if code == Abort.ENQUEUED_MISMATCH:
        return _enqueued_mismatch(group, sequence)
    if code == Abort.ENQUEUED_LOST:
        mine = describe_enqueued(members, group.rank, sequence) or "a call on GPU arrays"
        return PeerLostError(
            f"{who} lost rank {rank} in {mine} (#{sequence}): {_how_it_went(group, rank)}. "
            "The communicator is broken: close it. Arrays of its last calls are undefined"
        )
    if code == Abort.ENQUEUED_DEADLINE:
        start = f"{who}: rank {rank} gave up waiting"
        if group.rank == rank and waited_s is not None:
            start = f"{who} waited {waited_s:g} s"
        return DeadlineError(
            f"{start} in {called} on the GPU: {_late_enqueued(members, sequence)}. Is a rank "
            "stopped, very slow, or in another part of the program? Give a longer timeout_s if "
            "the work is uneven. The communicator is broken: close it"
        )
    return AbortedError(
        f"{who}: the communicator was given up: the GPU library of rank {rank} failed in {called}; "
        "that rank's error says why. Close it"
    )


def _enqueued_mismatch(group: HostGroup, sequence: int) -> MismatchError:
    by_call: dict[tuple[str, int], list[int]] = defaultdict(list)
    for rank in range(group.world_size):
        header = group.members.enqueued_header(rank, sequence)
        called = describe_enqueued(group.members, rank, sequence) or "nothing yet"
        by_call[called, header >> 32].append(rank)
    groups = sorted(by_call.items(), key=lambda item: len(item[1]))
    calls = "; ".join(f"{list_ranks(ranks)} called {called}" for (called, _), ranks in groups)
    return MismatchError(
        f"the ranks did not make the same call on GPU arrays (#{sequence}): {calls}. This is "
        f"{_who(group)}. Outputs are undefined; make the same calls in the same order on every "
        f"rank{_counts_hint(by_call)}. The communicator was aborted: close it"
    )


def _late_enqueued(members: Members, sequence: int) -> str:
    """Say which ranks had not made this call on GPU arrays."""
    late = [
        rank
        for rank in range(members.world_size)
        if difference(members.enqueued_header(rank, sequence) & 0xFFFFFFFF, sequence) < 0
    ]
    if late:
        return f"{list_ranks(late)} had not made this call"
    return "all ranks had made this call, but the GPUs had not finished it"


def _how_it_went(group: HostGroup, lost: int, after: str = "") -> str:
    if group.members.has_closed(lost):
        return f"it closed the communicator{after}{_why(group, lost)}"
    pid = group.members.pids[lost]
    return f"its process {pid} ended without closing the communicator"


def _why(group: HostGroup, rank: int) -> str:
    """Return the exception that took a rank out, as the end of a sentence."""
    reason = reasons.read(group.members, rank).rstrip(".")
    return f", because it raised {reason}" if reason else ""


def abort_error(group: HostGroup, word: int, waited_s: float | None = None) -> GpucollError:
    """Return the error that the segment's abort word stands for.

    `waited_s` is how long this rank itself waited, where it gave up a call on GPU arrays.
    """
    code, rank = word & 0xFF, (word >> 8) & 0xFFFFFF
    sequence = difference((word >> 32) & 0xFFFFFFFF, 0)
    if code == Abort.DEADLINE:
        return deadline_error(group, rank, sequence)
    if code == Abort.MESSAGE_DEADLINE:
        return _message_deadline_error(group, rank)
    # Memory goes before the process: whoever reads it may find that out first.
    if code == Abort.LOST or (code == Abort.UNREADABLE and group.members.ends_within(rank, 1.0)):
        return lost_error(group, rank, int(group.context[Context.SEQUENCE]))
    if code == Abort.UNREADABLE:
        return AbortedError(
            f"{_who(group)}: the communicator was given up: the kernel no longer lets its ranks "
            f"read the memory of rank {rank} (process {group.members.pids[rank]}). Close it; set "
            f"{config.CPU_TUNING}=single_copy_min_bytes={layout.NEVER} to do without"
        )
    if code in ENQUEUED:
        return enqueued_error(group, Abort(code), rank, sequence, waited_s)
    called = describe_call(group.members, rank, sequence) or "a call"
    reason = f"was interrupted in {called} (#{sequence})"
    if code != Abort.INTERRUPTED:
        reason = f"aborted it{_why(group, rank)}"
    return AbortedError(
        f"{_who(group)}: the communicator was given up: rank {rank} {reason}. Close it"
    )
