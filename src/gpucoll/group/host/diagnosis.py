"""Turn the records and words in the segment into errors that explain what happened."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gpucoll import config
from gpucoll.collectives import Collective
from gpucoll.errors import (
    AbortedError,
    DeadlineError,
    GpucollError,
    MismatchError,
    PeerLostError,
    SharedMemoryError,
)
from gpucoll.group.host.members import Members
from gpucoll.group.host.records import describe_call, describe_enqueued, difference
from gpucoll.group.host.whereabouts import (
    DEADLOCK,
    awaited_by_message,
    describe_message,
    is_stopped,
    last_call,
    late_for,
    message_timeout_s,
    numbered,
    present_call,
    trace,
)
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.layout import Abort, Record
from gpucoll.transport.shared.words import Context
from gpucoll.wording import MESSAGE_REASONS

if TYPE_CHECKING:
    from gpucoll.group.host.group import HostGroup

_BROKEN = "The communicator is broken: close it"
UNEVEN = (
    "Is a rank stopped, very slow, or in another part of the program? Give a longer timeout_s if "
    "the work is uneven"
)
_OTHER_ORDER = (
    "Is the other rank in a different call, or do two ranks wait for each other's message? "
    "send_recv() and group() avoid such deadlocks"
)
_IN_A_CIRCLE = (
    "Order the calls so that no rank waits for a later call of another rank; to send and receive "
    "several messages at once, use send_recv() or group()"
)


def _advice(found: str, advice: str) -> str:
    """Return the advice for a deadline whose text is `found`; a deadlock has its own."""
    return _IN_A_CIRCLE if found.endswith(DEADLOCK) else advice


def _own_call(group: HostGroup) -> str:
    """Return which call this rank is in, to follow "lost rank 1 "."""
    members, rank = group.members, group.rank
    last, is_in_it = last_call(members, rank)
    if last is not None and is_in_it:
        return f"in {numbered(describe_call(members, rank, last), last)}"
    if (message := describe_message(members, rank)) is not None:
        return f"in {message}"
    if last is None:
        return "before its first call"
    return f"after {numbered(describe_call(members, rank, last), last)}"


def _who(group: HostGroup) -> str:
    return group.members.who(group.rank)


def mismatch_error(group: HostGroup, sequence: int, *, is_broken: bool = False) -> MismatchError:
    """Return the error that lists what each rank called under this number, the odd ones first.

    `is_broken`: some ranks may have gone on to later calls, which breaks the communicator.
    """
    by_call: dict[tuple[str, int], list[int]] = defaultdict(list)
    for rank in range(group.world_size):
        word = group.members.header_word(rank, sequence)
        called = describe_call(group.members, rank, sequence) or "nothing yet, or something since"
        is_there = difference(word & 0xFFFFFFFF, sequence) == 0
        # By digest too: the record leaves out a fifth dimension, for example.
        by_call[called, word >> 32 if is_there else 0].append(rank)
    groups = sorted(by_call.items(), key=lambda item: len(item[1]))
    calls = "; ".join(
        f"{group.members.spelled(ranks)} called {called}" for (called, _), ranks in groups
    )
    if len({digest for _, digest in by_call}) == 1:  # an all_to_all whose counts conflict
        with group.members.held():
            calls = _pieces_disagreement(group.members, sequence) or calls
    elif len({called for called, _ in by_call}) < len(groups):
        calls += f" (they differ in what is not shown here: {_not_shown(groups[0][0][0])})"
    early = ("broadcast(", "scatter(")  # small ones: see `steps.wait_arrived`
    is_early = any(called.startswith(early) for called, _ in by_call)
    written = "Outputs are undefined" if is_early else "Nothing was written"
    who, after = _who(group), "The communicator stays usable"
    if is_broken:
        who, after = f"{who}, {_where(group, sequence)}", _GONE_ON
    return MismatchError(
        f"the ranks did not make the same call (#{sequence}): {calls}. This is {who}. "
        f"{written}; make the same calls in the same order on every rank{counts_hint(by_call)}. "
        f"{after}"
    )


_GONE_ON = (
    "Some ranks may have ended that call before the mismatch was found, so the ranks may be at "
    "different places in the program. The communicator is broken: call shrink() on every rank to "
    "go on, or close it"
)


def _where(group: HostGroup, sequence: int) -> str:
    """Return in which call this rank learns of a mismatch: in the call itself or in a later one."""
    present = present_call(group.members, group.rank)
    if present == sequence:
        return "in that call"
    if present is None:
        return "in its next call, which did not take place"
    called = numbered(describe_call(group.members, group.rank, present), present)
    return f"in {called}, which did not take place"


def _not_shown(called: str) -> str:
    """Return what can differ between calls whose descriptions are equal."""
    if "a list of" in called:
        return "the shapes of the list's arrays"
    if "counts=[" in called:
        return "counts beyond the eighth, or the size of a row"
    return "dimensions beyond the fourth, or which operator of a compiled program this is"


def counts_hint(by_call: Mapping[tuple[str, int], object]) -> str:
    """Return a hint at counts=, if the ranks may have meant blocks of different sizes."""
    names = {called.partition("(")[0] for called, _ in by_call}
    if len(names) != 1 or not names <= {each.spelled for each in Collective if each.has_blocks}:
        return ""
    if names <= {each.spelled for each in Collective if each.is_exchange}:
        return " (send_counts and recv_counts must agree between each two ranks)"
    return " (blocks of different sizes need counts=, the same on every rank)"


def late_ranks(group: HostGroup, gave_up: int, sequence: int) -> str:
    """Describe which ranks the rank that gave up was waiting for, and where they stand."""
    members = group.members
    missing, unfinished = (
        [rank for rank in late if rank != gave_up] for late in late_for(members, sequence)
    )
    if missing:
        found = trace(members, gave_up, missing, sequence)
        return f"{members.spelled(missing)} had not arrived{found}"
    others = [rank for rank in range(group.world_size) if rank != gave_up]
    late = unfinished or others
    found = trace(members, gave_up, late, sequence)
    return f"all had arrived, but {members.spelled(late)} had not finished{found}"


def deadline_error(group: HostGroup, gave_up: int, sequence: int) -> DeadlineError:
    """Return the error that names the rank that gave up, its call, and the ranks that were late."""
    called = describe_call(group.members, gave_up, sequence) or "a call"
    if group.rank == gave_up:
        seconds = round(int(group.context[Context.timeout_ns]) / 1e9, 3)
        start = f"{_who(group)} waited {seconds:g} s in {called} (#{sequence})"
    else:
        number = group.members.number(gave_up)
        start = f"{_who(group)}: rank {number} gave up waiting in {called} (#{sequence})"
    late = late_ranks(group, gave_up, sequence)
    return DeadlineError(f"{start}: {late}. {_advice(late, UNEVEN)}. {_BROKEN}")


def lost_error(group: HostGroup, lost: int) -> GpucollError:
    """Return the error that names the rank that is gone, and how it went."""
    if lost >= group.members.world_size:
        return group.lost_elsewhere(lost)
    status = group.members.status_offset(lost)
    last = group.members.load(status + layout.STATUS_CLOSED_SEQUENCE)
    has_called = last != group.members.tuning.initial_sequence
    when = f" after call #{last}" if has_called else " before its first call"
    how = _how_it_went(group, lost, when)
    return PeerLostError(
        f"{_who(group)} lost rank {group.members.number(lost)} {_own_call(group)}: {how}. "
        "The communicator is broken: close it"
    )


def _message_deadline_error(group: HostGroup, gave_up: int) -> DeadlineError:
    """Return the error that names the rank that gave up waiting for a message."""
    called = describe_message(group.members, gave_up) or "a message"
    who = f"{_who(group)} waited {message_timeout_s(group.members, gave_up):g} s"
    if group.rank != gave_up:
        who = f"{_who(group)}: rank {group.members.number(gave_up)} gave up waiting"
    why = "nobody had received it" if called.startswith("send") else "no such message had come"
    awaited = awaited_by_message(group.members, gave_up)
    found = trace(group.members, gave_up, awaited)
    if group.rank == gave_up:
        found += group.standing_elsewhere([rank for rank in awaited if rank >= group.world_size])
    advice = _advice(found, _OTHER_ORDER)
    return DeadlineError(f"{who} in {called}: {why}{found}. {advice}. {_BROKEN}")


ENQUEUED = (
    Abort.ENQUEUED_MISMATCH,
    Abort.ENQUEUED_DEADLINE,
    Abort.ENQUEUED_LOST,
    Abort.ENQUEUED_MESSAGE,
    Abort.BACKEND,
)
"""Abort codes whose sequence number counts the calls on GPU arrays."""


def enqueued_error(
    group: HostGroup, code: Abort, rank: int, sequence: int, waited_s: float | None = None
) -> GpucollError:
    """Return the error for an abort code that a call on GPU arrays has caused."""
    who, members = _who(group), group.members
    called = f"{describe_enqueued(members, rank, sequence) or 'a call on GPU arrays'} (#{sequence})"
    if code == Abort.ENQUEUED_MISMATCH:
        return _enqueued_mismatch(group, sequence)
    if code == Abort.ENQUEUED_LOST:
        mine = describe_enqueued(members, group.rank, sequence) or "a call on GPU arrays"
        return PeerLostError(
            f"{who} lost rank {members.number(rank)} in {mine} (#{sequence}): "
            f"{_how_it_went(group, rank)}. The communicator is broken: close it. Arrays of its "
            "last calls are undefined"
        )
    if code == Abort.ENQUEUED_DEADLINE:
        start = f"{who}: rank {members.number(rank)} gave up waiting"
        if group.rank == rank and waited_s is not None:
            start = f"{who} waited {waited_s:g} s"
        late = _late_enqueued(members, rank, sequence)
        advice = _advice(late, UNEVEN)
        return DeadlineError(f"{start} in {called} on the GPU: {late}. {advice}. {_BROKEN}")
    if code == Abort.ENQUEUED_MESSAGE:
        return DeadlineError(
            f"{who}: rank {members.number(rank)} gave up waiting for a message of GPU arrays: "
            f"{MESSAGE_REASONS}. {_BROKEN}"
        )
    return AbortedError(
        f"{who}: the communicator was given up: the GPU library of rank {members.number(rank)} "
        f"failed in {called}; that rank's error says why. Close it"
    )


def _enqueued_mismatch(group: HostGroup, sequence: int) -> MismatchError:
    by_call: dict[tuple[str, int], list[int]] = defaultdict(list)
    for rank in range(group.world_size):
        header = group.members.enqueued_header(rank, sequence)
        called = describe_enqueued(group.members, rank, sequence) or "nothing yet"
        by_call[called, header >> 32].append(rank)
    groups = sorted(by_call.items(), key=lambda item: len(item[1]))
    calls = "; ".join(
        f"{group.members.spelled(ranks)} called {called}" for (called, _), ranks in groups
    )
    return MismatchError(
        f"the ranks did not make the same call on GPU arrays (#{sequence}): {calls}. This is "
        f"{_who(group)}. Outputs are undefined; make the same calls in the same order on every "
        f"rank{counts_hint(by_call)}. The communicator was aborted: close it"
    )


def _late_enqueued(members: Members, gave_up: int, sequence: int) -> str:
    """Describe which ranks had not made this call on GPU arrays."""
    late = [
        rank
        for rank in range(members.world_size)
        if difference(members.enqueued_header(rank, sequence) & 0xFFFFFFFF, sequence) < 0
    ]
    if late:
        return f"{members.spelled(late)} had not made this call{trace(members, gave_up, late)}"
    stopped = [rank for rank in range(members.world_size) if is_stopped(members, rank)]
    said = [f"; rank {rank} is stopped (process {members.pids[rank]})" for rank in stopped]
    return "all ranks had made this call, but the GPUs had not finished it" + "".join(said)


def _how_it_went(group: HostGroup, lost: int, after: str = "") -> str:
    if group.members.has_closed(lost):
        return f"it closed the communicator{after}{why(group, lost)}"
    pid = group.members.pids[lost]
    return f"its process {pid} ended without closing the communicator"


def why(group: HostGroup, rank: int) -> str:
    """Return the exception that took a rank out of the group, as the end of a sentence."""
    reason = group.members.read_reason(rank).rstrip(".")
    return f", because it raised {reason}" if reason else ""


def abort_error(group: HostGroup, word: int, waited_s: float | None = None) -> GpucollError:
    """Return the error that the segment's abort word stands for.

    `waited_s` is how long this rank itself waited, if it gave up a call on GPU arrays.
    """
    code, rank = word & 0xFF, (word >> 8) & 0xFFFFFF
    number = group.members.number(rank)
    sequence = difference((word >> 32) & 0xFFFFFFFF, 0)
    if code == Abort.ELSEWHERE:
        return group.error_elsewhere()
    if code == Abort.DEADLINE:
        return deadline_error(group, rank, sequence)
    if code == Abort.MESSAGE_DEADLINE:
        return _message_deadline_error(group, rank)
    # The kernel frees a process's memory before the process ends, so a rank that reads that memory
    # may notice first.
    if code == Abort.LOST or (code == Abort.UNREADABLE and group.members.ends_within(rank, 1.0)):
        return lost_error(group, rank)
    if code == Abort.MISMATCH:
        return mismatch_error(group, sequence, is_broken=True)
    if code == Abort.UNREADABLE:
        return AbortedError(
            f"{_who(group)}: the communicator was given up: the kernel no longer lets its ranks "
            f"read the memory of rank {number} (process {group.members.pids[rank]}). Close it; set "
            f"{config.CPU_TUNING}=single_copy_min_bytes={layout.NEVER} to do without"
        )
    if code == Abort.NO_ROOM:
        tuning = group.members.tuning
        return SharedMemoryError(
            f"{_who(group)}: there was no shared memory for the stages of rank {number} "
            f"({tuning.chunk_bytes * tuning.n_stages} bytes), which was found when all ranks were "
            "in the call. The communicator is broken: close it, and free memory or use fewer ranks"
        )
    if code == Abort.NO_ADDRESSES:
        return SharedMemoryError(
            f"{_who(group)}: rank {number} has no address space left to map another rank's arrays "
            "of comm.empty. Raise the limit of the process (ulimit -v, "
            "/proc/sys/vm/max_map_count), or make its own arena smaller with "
            f"{config.ARENA_BYTES}. The communicator is broken: close it"
        )
    if code in ENQUEUED:
        return enqueued_error(group, Abort(code), rank, sequence, waited_s)
    reason = f"aborted it{why(group, rank)}"
    if code == Abort.INTERRUPTED:
        called = numbered(describe_call(group.members, rank, sequence), sequence)
        _, is_in_it = last_call(group.members, rank)
        message = None if is_in_it else describe_message(group.members, rank)
        reason = f"was interrupted in {message or called}"
    return AbortedError(
        f"{_who(group)}: the communicator was given up: rank {number} {reason}. Close it"
    )


# --- counts for an all_to_all that contradict each other ------------------------------------------


def _pieces_disagreement(members: Members, sequence: int) -> str:
    """Describe between which ranks send_counts and recv_counts differ; empty: they agree.

    The ranks' tables are still in the slots of this call, because no rank has begun another call.
    """
    everyone = range(members.world_size)
    records = [members.record_words(rank, sequence) for rank in everyone]
    exchanges = {int(each) for each in Collective if each.is_exchange}
    if not {int(record[Record.collective]) for record in records} <= exchanges:
        return ""
    if not all(record[Record.n_counts] for record in records):
        return ""
    tables = [members.pieces_words(rank, sequence) for rank in everyone]
    found = []
    for sender in everyone:
        for receiver in everyone:
            sent = int(tables[sender][receiver])
            expected = int(tables[receiver][members.world_size + sender])
            if sent != expected:
                found.append((sender, receiver, sent, expected))
    if not found:
        return ""
    sender, receiver, sent, expected = found[0]
    row_bytes = _row_bytes(records)
    if row_bytes and not sent % row_bytes and not expected % row_bytes:
        sizes = f"{sent // row_bytes} rows", f"{expected // row_bytes}"
    else:
        sizes = f"{sent} bytes", f"{expected}"
    more = f" (and {len(found) - 1} more pairs of ranks differ)" if len(found) > 1 else ""
    return (
        f"rank {sender} sends {sizes[0]} to rank {receiver}, which expects {sizes[1]}, in "
        f"all_to_all with send_counts and recv_counts{more}"
    )


def _row_bytes(records: list[npt.NDArray[np.int64]]) -> int:
    """Return the size of a row in bytes, which all ranks agree on; 0 if no rank has a row."""
    for record in records:
        rows = int(record[Record.dimensions])
        if rows > 0:
            return int(record[Record.size_bytes]) // rows
    return 0
