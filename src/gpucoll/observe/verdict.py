"""Who makes a job wait: one sentence, from where its ranks stand.

A rank waits for ranks that are not where it is. Those may wait for others in turn. Whoever is at
the end of such a chain and waits for nobody is the one to look at; if there is no such end, the
ranks wait for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpucoll.observe.look import HOST_SHIFT, Job, RankLook
from gpucoll.observe.processes import Process
from gpucoll.wording import range_of_ranks

__all__ = ["Verdict", "ends_of", "judge"]

PATIENCE_S = 2.0
"""A wait shorter than this is nothing to report."""
MEETING_PATIENCE = 5.0
"""In `init` ranks may wait so many times as long: programs start, and import, at their own pace."""
_BUSY = 0.5
_SWAPPED_BYTES = 1 << 20
_MOST_TOLD = 3


@dataclass(frozen=True)
class Verdict:
    """What is the matter.

    Attributes
    ----------
    kind : str
        ``"moving"``, ``"outside"`` (no rank is in a call), ``"over"`` (all have ended),
        ``"waiting"`` (for ranks that do something else), ``"circle"``, ``"ended"``,
        ``"stopped"``, ``"swapping"``, ``"closed"``,
        ``"stream"`` (a GPU has other work that does not end), ``"elsewhere"`` (other hosts are
        awaited), ``"missing"`` (ranks are awaited of which no process is known), ``"link"`` (all
        hosts are in one call, and their data does not arrive), ``"still"`` (all are in one call,
        and nothing moves).
    text : str
        One or two sentences.
    ranks : list of int
        The ranks to look at.
    """

    kind: str
    text: str
    ranks: tuple[int, ...] = ()

    @property
    def is_healthy(self) -> bool:
        """Whether nothing needs to be looked at."""
        return self.kind in ("moving", "outside", "over")


def judge(job: Job, patience_s: float = PATIENCE_S) -> Verdict:
    """Say who makes the others wait."""
    if not job.living and not job.elsewhere:  # they were there when its memory was mapped
        return Verdict("over", "The job is over: all its processes have ended.")
    late = [
        one
        for one in job.ranks
        if one.since_s is not None and one.since_s >= patience_s * _more_patience(job, one)
    ]
    if not late:
        return _calm(job)
    streams = {one.communicator for one in job.ranks if one.stream and one.has_moved}
    slow = [one for one in late if one.stream and one.communicator in streams]
    late = [one for one in late if one not in slow]
    if ends := ends_of(job, late):
        behind = _behind(job, ends)
        return _blamed(job, [one for one in late if one.pid in behind], ends)
    moving = _behind(job, _moved(job))
    going = {one.communicator for one in job.ranks if one.has_moved}
    still = [
        one
        for one in late
        if one.stream
        or not (one.pid in moving or (one.awaits_other_hosts and one.communicator in going))
    ]
    if not still:
        return _slow(late + slow)
    if missing := sorted({number for one in still for number in one.missing}):
        return _missing(still, missing)
    if any(one.awaits_other_hosts for one in still):
        return _elsewhere(job, still)
    cut = [one for one in still if one.unheard]
    if any(one.has_traffic for one in cut):
        return _slow(still)
    return _cut(job, still, cut) if cut else _among_themselves(job, still, moving)


def _slow(late: list[RankLook]) -> Verdict:
    waits = f"{_who(late)} {_verb(late, 'waits', 'wait')}"
    return Verdict("moving", f"{waits} for data that is on its way: slow, not stuck.")


def _more_patience(job: Job, one: RankLook) -> float:
    """Return how many times as long as elsewhere a rank may wait where it stands."""
    is_meeting = job.names[one.communicator] is None and one.communicator < len(job.names) - 1
    return MEETING_PATIENCE if is_meeting else 1.0


# --- who is at the end ----------------------------------------------------------------------------


def _waiting_of(job: Job) -> dict[int, list[RankLook]]:
    """Return the calls in which each process waits for others."""
    found: dict[int, list[RankLook]] = {}
    for one in job.ranks:
        if one.is_in_call and (one.awaited or one.awaits_other_hosts or one.missing or one.unheard):
            found.setdefault(one.pid, []).append(one)
    return found


def ends_of(job: Job, late: Iterable[RankLook]) -> list[int]:
    """Return the processes that others wait for, directly or not, and that wait for nobody.

    A process that has just done something for a call, or a message, will get to the next one.
    """
    waiting, moved, ends, seen = _waiting_of(job), _moved(job), list[int](), set[int]()
    pending = [pid for one in late for pid in one.awaited]
    pending += [one.pid for one in late if _cannot_go_on(job.processes[one.pid])]
    before = {one.pid for one in late if one.stream == "before" and not one.awaited}
    pending += before
    while pending:
        pid = pending.pop(0)
        if pid in seen:
            continue
        seen.add(pid)
        is_waiting, is_moving = pid in waiting, pid in moved and pid not in before
        if _cannot_go_on(job.processes[pid]) or not (is_waiting or is_moving):
            ends.append(pid)
        elif is_waiting:
            pending += [other for one in waiting[pid] for other in one.awaited]
    return ends


def _moved(job: Job) -> set[int]:
    """Return the processes that did something within the moment, apart from their GPUs."""
    return {one.pid for one in job.ranks if one.has_moved and not one.stream}


def _behind(job: Job, pids: Iterable[int]) -> set[int]:
    """Return some processes and those that wait for them, directly or not."""
    waiters = defaultdict[int, set[int]](set)
    for pid, looks in _waiting_of(job).items():
        for one in looks:
            for other in one.awaited:
                waiters[other].add(pid)
    found, pending = set[int](), [*pids]
    while pending:
        pid = pending.pop()
        if pid not in found:
            found.add(pid)
            pending += waiters[pid]
    return found


def _cannot_go_on(process: Process | None) -> bool:
    return process is None or process.has_ended or process.is_stopped


def _blamed(job: Job, late: list[RankLook], ends: list[int]) -> Verdict:
    """Return the verdict on processes at the end: those that are worst off first."""
    told = [_condition(job, pid) for pid in ends]
    for kind in ("ended", "stopped", "swapping", "closed", "stream", "waiting"):
        group = [pid for pid, (found, _) in zip(ends, told, strict=True) if found == kind]
        if group:
            break
    waiters = [one for one in late if one.pid not in group]
    ranks = tuple(sorted(job.number(pid) for pid in group))
    start = f"{_waits(waiters)} for {range_of_ranks(ranks)}. " if waiters else ""
    return Verdict(kind, start + _told_of(job, group, is_named=not waiters), ranks)


def _told_of(job: Job, pids: list[int], is_named: bool) -> str:
    """Return a sentence on each of some processes, in the order of their ranks."""
    pids = sorted(pids, key=job.number)
    if len(pids) == 1 and not is_named:
        return f"It {_condition(job, pids[0])[1]}."
    sentences = [f"Rank {job.number(pid)} {_condition(job, pid)[1]}." for pid in pids[:_MOST_TOLD]]
    more = len(pids) - len(sentences)
    return " ".join([*sentences, *([f"{more} more are alike."] if more else [])])


def _condition(job: Job, pid: int) -> tuple[str, str]:
    """Return the kind of trouble that a process is in, and what completes "rank 1 ..."."""
    process = job.processes[pid]
    awaited = {one.communicator for one in job.ranks if pid in one.awaited}
    own = [one for one in job.ranks if one.pid == pid]
    own = [one for one in own if one.communicator in awaited] or own
    number = job.spelled(pid)
    closed = [one for one in own if one.closed is not None]
    if process is None or process.has_ended:
        return (
            "ended",
            f"has ended (process {number}): its output, or the kernel's log if it was killed, "
            "says why",
        )
    if process.is_stopped:
        by = "a debugger" if process.state == "t" else "a signal"
        return "stopped", f"is stopped by {by}; kill -CONT {number} lets it go on"
    if process.swap_bytes > _SWAPPED_BYTES and process.state == "D":
        return (
            "swapping",
            f"is swapping (process {number}, {process.swap_bytes >> 20} MiB on the swap device): "
            "the host lacks memory",
        )
    if closed:
        why = f", because it raised {closed[0].closed}" if closed[0].closed else ""
        return ("closed", f"has already closed the communicator{why} (process {number})")
    for one in own:
        if one.stream == "before" and not one.awaited:
            call = one.text.partition(" before ")[2]
            return "stream", (
                f"has other work on the stream before {call}, which has not ended for "
                f"{one.since_s or 0:.1f} s (process {number})"
            )
    share = job.cpu.get(pid, 0.0)
    doing = (
        f"uses {share:.0%} of a CPU"
        if share >= _BUSY or process.state == "R"
        else "sleeps" + (f" in {process.where}" if process.where else "")
    )
    last = next((one.text for one in own if not one.is_in_call), "")
    return "waiting", f"is {last or 'in its part of that call'}; process {number} {doing}"


# --- other verdicts -------------------------------------------------------------------------------


def _calm(job: Job) -> Verdict:
    stopped = [pid for pid in job.pids if _cannot_go_on(job.processes[pid])]
    stopped = [pid for pid in stopped if not _is_at_its_end(job, pid)]
    if stopped:
        ranks = tuple(sorted(job.number(pid) for pid in stopped))
        kind = _condition(job, stopped[0])[0]
        return Verdict(kind, _told_of(job, stopped, is_named=True), ranks)
    if any(one.has_moved or one.is_in_call for one in job.ranks):
        return Verdict("moving", "No rank has been waiting for long: the job moves.")
    busy = sum(share >= _BUSY for share in job.cpu.values())
    where = "a call of gpucoll"
    if all(name is None for name in job.names):
        where = "a communicator: none has called init, or all have closed what they had"
    text = f"No rank is in {where}; {busy} of {len(job.processes)} compute."
    return Verdict("outside", text)


def _missing(late: list[RankLook], numbers: list[int]) -> Verdict:
    text = (
        f"{_waits(late)} for {range_of_ranks(numbers)}. No process of "
        f"{'it' if len(numbers) == 1 else 'them'} is found here: not started, ended, or on another "
        "host."
    )
    return Verdict("missing", text, tuple(numbers))


def _is_at_its_end(job: Job, pid: int) -> bool:
    return all(one.closed is not None for one in job.ranks if one.pid == pid)


def _elsewhere(job: Job, late: list[RankLook]) -> Verdict:
    start = f"{_waits(late)} for ranks of other hosts."
    if not job.silent:
        text = "Run gpucoll why --json there, and gpucoll why --merge here."
        return Verdict("elsewhere", f"{start} {text}")
    told = [f"{name} ({range_of_ranks(ranks)})" for name, ranks in job.silent.items()]
    text = (
        f"Nothing is heard of {', '.join(told)}: its first rank is stopped or has ended, or the "
        "connection to it does not carry data."
    )
    text += _unacknowledged(job, late)
    ranks = sorted(rank for ranks in job.silent.values() for rank in ranks)
    return Verdict("elsewhere", f"{start} {text}", tuple(ranks))


def _unacknowledged(job: Job, late: list[RankLook]) -> str:
    """Return a sentence on the connections that are known to be cut; empty: none is."""
    told = [
        f"What rank {job.number(one.pid)} has sent to {', '.join(one.unacknowledged)} is not "
        "acknowledged."
        for one in late
        if one.unacknowledged
    ]
    return "".join(f" {sentence}" for sentence in told[:_MOST_TOLD])


def _cut(job: Job, late: list[RankLook], cut: list[RankLook]) -> Verdict:
    """Return the verdict on hosts that are all in one call and do not hear of each other."""
    found = sorted({host for one in cut for host in (one.pid >> HOST_SHIFT, *one.unheard)})
    names = " and ".join(job.hosts[host] for host in found[:2])
    # Each host counts its calls by itself.
    late = [replace(one, text=one.text.partition(" (#")[0]) for one in late]
    between = names if len(found) == 2 else "two of " + ", ".join(job.hosts[h] for h in found)
    text = (
        f"{_waits(late)}, which all ranks have entered, and nothing moves: the connection between "
        f"{between} does not carry data.{_unacknowledged(job, cut)}"
    )
    return Verdict("link", text, tuple(sorted({one.rank for one in cut})))


def _among_themselves(job: Job, late: list[RankLook], moving: set[int]) -> Verdict:
    waiting = _waiting_of(job)
    circle: list[int] = []
    pid = late[0].pid
    while pid not in circle and pid in waiting:
        circle.append(pid)
        awaited = (other for one in waiting[pid] for other in one.awaited)
        pid = next((other for other in awaited if other not in moving), -1)
    circle = circle[circle.index(pid) :] if pid in circle else []
    start = min(range(len(circle)), key=lambda place: job.number(circle[place]), default=0)
    circle = circle[start:] + circle[:start]
    ranks = tuple(job.number(each) for each in circle)
    calls = {(one.communicator, one.text) for each in circle for one in waiting[each]}
    if len(ranks) > 1 and len(calls) > 1:
        links = "; ".join(
            f"rank {job.number(each)} is {' and '.join(map(job.place, waiting[each]))}"
            for each in circle
        )
        return Verdict(
            "circle", f"{range_of_ranks(ranks).capitalize()} wait for each other: {links}.", ranks
        )
    entered = "all GPUs have begun" if late[0].stream else "all ranks have entered"
    text = f"{_waits(late)}, which {entered}, and nothing moves."
    return Verdict("still", text, tuple(sorted({one.rank for one in late})))


def _waits(late: list[RankLook]) -> str:
    """Return "Ranks 0, 2 have been waiting in ... for 3.2 s"."""
    longest = max(late, key=lambda one: one.since_s or 0)
    same = [one for one in late if one.text == longest.text]
    where = longest.text.removeprefix("waiting ")
    verb = _verb(same, "has", "have")
    return f"{_who(same)} {verb} been waiting for {longest.since_s:.1f} s {where}"


def _who(ranks: list[RankLook]) -> str:
    return range_of_ranks(sorted({one.rank for one in ranks})).capitalize()


def _verb(ranks: list[RankLook], one: str, several: str) -> str:
    return one if len({each.rank for each in ranks}) == 1 else several
