"""Jobs that hang, or do not, drawn from seeds: what `gpucoll why` must say of each is known.

A job is data: a script of steps for each rank, which `play` runs. `tools/trial_observe.py` plays
hundreds of them, and `test_trials.py` a few.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
from tests.ranks import Pool
from tests.waiting import until

from gpucoll.observe import segments
from gpucoll.observe.look import MOMENT_S, Job, jobs_of, look
from gpucoll.observe.verdict import PATIENCE_S, Verdict, judge

__all__ = [
    *("Alarm", "HANGS", "HEALTHY", "Draw", "Trial", "hanging", "healthy", "play"),
    *("false_alarm", "first_alarm", "verdicts_on"),
]

Step = tuple[Any, ...]
Scripts = list[list[Step]]

FOREVER_S = 3600.0
DEADLINE_S = 600.0
SMALL, LARGE = 8, 1 << 18
COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "reduce", "scan", "all_to_all", "barrier")


@dataclass(frozen=True)
class Trial:
    """A job, and what is right to say of it.

    Attributes
    ----------
    kind : str
        One of `HANGS` or `HEALTHY`.
    scripts : list of lists
        The steps of each rank.
    verdicts : tuple of str
        The kinds of verdict that are right.
    sides : tuple of frozenset
        The verdict must name a rank of each of these sets, and no rank beside them. So a rank that
        must be named has a set of its own, and ranks that wait for each other in two groups are
        two sets.
    """

    kind: str
    scripts: Scripts
    verdicts: tuple[str, ...] = ("moving", "outside")
    sides: tuple[frozenset[int], ...] = ()

    @property
    def n_ranks(self) -> int:
        """The number of ranks."""
        return len(self.scripts)

    def is_right(self, verdict: Verdict) -> bool:
        """Return whether a verdict is of the right kind, and names the right ranks."""
        named = {*verdict.ranks}
        return (
            verdict.kind in self.verdicts
            and all(named & side for side in self.sides)
            and named <= frozenset[int]().union(*self.sides)
        )


# --- what a rank does -----------------------------------------------------------------------------


def play(seat: Any, scripts: Scripts, marks: Path) -> None:
    """Run a rank's script, and check what its calls return.

    ::

        ("split", name, of, colors, keys)     a communicator's ranks are divided into others
        ("call", of, collective, n, root, is_async)
        ("send" | "recv", of, peer, n, tag)   n elements
        ("sleep" | "compute", seconds)
        ("stop", seconds)                     SIGSTOP for itself after this time
        ("die",)                              SIGKILL for itself
        ("close", name)
        ("mark",)                             the rank's next step is the last one before the hang
        ("repeat", times, steps)
    """
    with seat.init(timeout_s=DEADLINE_S, meet_s=120.0) as world:
        rank = Rank(seat.rank, marks, {"world": world})
        try:
            for step in scripts[seat.rank]:
                rank.run(step)
        finally:
            for each in [*rank.comms.values()][1:]:
                each.close()


@dataclass
class Rank:
    """A rank at work on its script."""

    number: int
    marks: Path
    comms: dict[str, Any]

    def run(self, step: Step) -> None:
        """Do one step."""
        name, *given = step
        getattr(self, f"_{name}")(*given)

    def _repeat(self, times: int, steps: Sequence[Step]) -> None:
        for _ in range(times):
            for step in steps:
                self.run(step)

    def _split(self, name: str, of: str, colors: Sequence[int | None], keys: Sequence[int]) -> None:
        comm = self.comms[of]
        made = comm.split(colors[self.number], keys[self.number])
        if made is not None:
            self.comms[name] = made

    def _close(self, name: str) -> None:
        if name in self.comms:
            self.comms.pop(name).close()

    def _call(self, of: str, name: str, n: int, root: int, is_async: bool) -> None:
        comm = self.comms[of]
        if name == "barrier":
            comm.barrier()
            return
        x = np.ones(n * comm.world_size if name == "all_to_all" else n)
        given = {"root": root % comm.world_size} if name in ("broadcast", "reduce") else {}
        got = getattr(comm, name)(x, async_op=is_async, **given)
        if is_async:
            got = got.wait()
        sums = {"all_reduce": comm.world_size, "reduce": comm.world_size, "scan": comm.rank + 1}
        assert got is None or (got[-1] == got[0] == sums.get(name, 1))

    def _send(self, of: str, peer: int, n: int, tag: int) -> None:
        self.comms[of].send(np.full(n, tag, np.float64), peer, tag)

    def _recv(self, of: str, peer: int, n: int, tag: int) -> None:
        assert self.comms[of].recv(like=np.empty(n), source=peer, tag=tag)[-1] == tag

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def _compute(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            sum(range(1000))

    def _stop(self, seconds: float) -> None:
        if seconds:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        else:
            os.kill(os.getpid(), signal.SIGSTOP)

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    def _mark(self) -> None:
        with self.marks.open("r+b") as file:
            file.seek(self.number)
            file.write(b"!")


# --- jobs that hang -------------------------------------------------------------------------------


class Draw(random.Random):
    """Draws the parts of a job of a number of ranks."""

    def __init__(self, kind: str, seed: int, n_ranks: int) -> None:
        super().__init__(f"{kind} {seed} {n_ranks}")
        self.n_ranks = n_ranks
        self.everyone = range(n_ranks)
        self.names = ["world"]

    def rank(self, but: Sequence[int] = ()) -> int:
        """Return a rank that is none of some."""
        return self.choice([rank for rank in self.everyone if rank not in but])

    def call(self, of: str = "world") -> Step:
        """Return a collective of a communicator."""
        n = self.choice((SMALL, SMALL, LARGE // self.n_ranks))
        is_async = self.random() < 0.2
        return ("call", of, self.choice(COLLECTIVES), n, self.randrange(64), is_async)

    def communicators(self) -> list[Step]:
        """Return steps that make some communicators of all ranks, or of a half of them each."""
        splits: list[Step] = []
        for name in ("same", "mirror", "halves"):
            if self.random() < 0.5:
                colors = [rank % 2 if name == "halves" else 0 for rank in self.everyone]
                keys = [-rank if name == "mirror" else rank for rank in self.everyone]
                splits.append(("split", name, "world", colors, keys))
                self.names.append(name)
        return splits

    def work(self, most: int = 12) -> list[Step]:
        """Return collectives of all ranks: they come in the same order everywhere."""
        return [self.call(self.choice(self.names)) for _ in range(self.randrange(most))]

    def start(self) -> Scripts:
        """Return the same first steps for all ranks."""
        steps = [*self.communicators(), *self.work(), BARRIER]
        return [[*steps] for _ in self.everyone]

    def wide(self) -> str:
        """Return a communicator of all ranks."""
        return self.choice([name for name in self.names if name != "halves"])

    def last(self, of: str) -> list[Step]:
        """Return the calls in which ranks come to wait for one that does not come."""
        return [MARK, self.call(of), barrier(of), BARRIER, BARRIER]


MARK = ("mark",)


def barrier(of: str = "world") -> Step:
    """Return a barrier of a communicator."""
    return ("call", of, "barrier", 0, 0, False)


BARRIER = barrier()


def _away(draw: Draw, how: str) -> Trial:
    """One rank is outside gpucoll."""
    culprit, scripts = draw.rank(), draw.start()
    others = draw.last(draw.choice(draw.names))
    for rank, script in enumerate(scripts):
        script += [MARK, (how, FOREVER_S)] if rank == culprit else others
    return Trial(f"{how}s", scripts, ("waiting",), (frozenset({culprit}),))


def _skipped(draw: Draw) -> Trial:
    """One rank has left out one of several equal calls, then sleeps, or goes on elsewhere."""
    culprit, scripts, of = draw.rank(), draw.start(), draw.wide()
    call = ("call", of, draw.choice(("all_reduce", "barrier")), SMALL, 0, False)
    times = draw.randrange(2, 6)
    is_elsewhere = len(draw.names) > 1 and draw.random() < 0.6
    elsewhere = draw.choice([name for name in draw.names if name != of] or ["world"])
    others = [*[call] * (times - 1), MARK, call, barrier(elsewhere), BARRIER]
    left = barrier(elsewhere) if is_elsewhere else ("sleep", FOREVER_S)
    for rank, script in enumerate(scripts):
        script += [*[call] * (times - 1), MARK, left] if rank == culprit else others
    rest = frozenset(draw.everyone) - {culprit}
    if not is_elsewhere:
        return Trial("skipped", scripts, ("waiting",), (frozenset({culprit}),))
    if elsewhere == "halves":
        rest = frozenset(rank for rank in rest if rank % 2 == culprit % 2)
        if not rest:  # its half is itself: it has passed there, and is in no call
            scripts[culprit][-1] = ("sleep", FOREVER_S)
            return Trial("skipped", scripts, ("waiting",), (frozenset({culprit}),))
    return Trial("skipped", scripts, ("circle",), (frozenset({culprit}), rest))


def _orders(draw: Draw) -> Trial:
    """Some ranks call two communicators in one order, the others in the other."""
    same = ("split", "other", "world", [0] * draw.n_ranks, [*draw.everyone])
    scripts = [[same, *script] for script in draw.start()]
    count = draw.choice((1, draw.randrange(1, draw.n_ranks)))
    some = frozenset(draw.sample(draw.everyone, count))
    calls = [draw.choice((barrier(of), _reduction(of))) for of in (draw.wide(), "other")]
    for rank, script in enumerate(scripts):
        script += [MARK, *(calls[::-1] if rank in some else calls)]
    return Trial("orders", scripts, ("circle",), (some, frozenset(draw.everyone) - some))


def _reduction(of: str) -> Step:
    return ("call", of, "all_reduce", SMALL, 0, False)


def _receive(draw: Draw) -> Trial:
    """One rank receives what another does not send; that one sleeps, or waits with all others."""
    scripts, receiver = draw.start(), draw.rank()
    sender = draw.rank((receiver,))
    is_asleep, n = draw.random() < 0.5, draw.choice((SMALL, LARGE))
    if draw.random() < 0.5:  # a message with another tag
        scripts[sender].append(("send", "world", receiver, SMALL, 5))
    for rank, script in enumerate(scripts):
        if rank == receiver:
            script += [MARK, ("recv", "world", sender, n, 6), BARRIER]
        elif rank == sender and is_asleep:
            script += [MARK, ("sleep", FOREVER_S)]
        else:
            script += [MARK, BARRIER]
    if is_asleep:
        return Trial("receive", scripts, ("waiting",), (frozenset({sender}),))
    return Trial("receive", scripts, ("circle",), (frozenset({receiver}), frozenset({sender})))


def _circle(draw: Draw) -> Trial:
    """2 to 5 ranks each receive from the next one before it sends, or send before it receives."""
    scripts = draw.start()
    ring = draw.sample(draw.everyone, draw.randrange(2, min(5, draw.n_ranks) + 1))
    way = draw.choice(("recv", "send"))
    for place, rank in enumerate(ring):
        scripts[rank] += [MARK, (way, "world", ring[(place + 1) % len(ring)], LARGE * 8, 1)]
    for rank in {*draw.everyone} - {*ring}:
        scripts[rank] += draw.last("world")
    return Trial("circle", scripts, ("circle",), tuple(frozenset({rank}) for rank in ring))


def _stopped(draw: Draw) -> Trial:
    """One rank is stopped, before a call or within one."""
    scripts, culprit, of = draw.start(), draw.rank(), draw.choice(draw.names)
    is_within = draw.random() < 0.5
    others = draw.last(of)
    if is_within and draw.n_ranks > 2:
        late = draw.rank((culprit,))
        for rank, script in enumerate(scripts):
            first = {culprit: ("stop", 0.1), late: ("sleep", 0.5)}.get(rank, ("sleep", 0.0))
            script += [*others[:1], first, *others[1:]]
    else:
        for rank, script in enumerate(scripts):
            script += [MARK, ("stop", 0), BARRIER] if rank == culprit else others
    return Trial("stopped", scripts, ("stopped",), (frozenset({culprit}),))


def _chain(draw: Draw) -> Trial:
    """Each of 2 to 5 ranks waits for the next one in a communicator of these two alone."""
    path = draw.sample(draw.everyone, draw.randrange(2, min(5, draw.n_ranks) + 1))
    pairs = [*itertools.pairwise(path)]
    splits = [
        ("split", f"pair {place}", "world", [0 if rank in pair else None for rank in draw.everyone],
         [*draw.everyone])
        for place, pair in enumerate(pairs)
    ]  # fmt: skip
    draw.shuffle(splits)
    scripts = [[*splits, *script] for script in draw.start()]
    for place, (rank, other) in enumerate(pairs):
        receive = ("recv", f"pair {place}", int(other > rank), SMALL, 3)
        scripts[rank] += [MARK, draw.choice((receive, barrier(f"pair {place}"))), BARRIER]
    end, kind = draw.choice(((("sleep", FOREVER_S), "waiting"), (("compute", FOREVER_S), "waiting"),
                             (("stop", 0), "stopped")))  # fmt: skip
    scripts[path[-1]] += [MARK, end]
    for rank in {*draw.everyone} - {*path}:
        scripts[rank] += draw.last("world")
    return Trial("chain", scripts, (kind,), (frozenset({path[-1]}),))


def _ended(draw: Draw) -> Trial:
    """One rank has been killed, while the others are outside gpucoll."""
    scripts, culprit = draw.start(), draw.rank()
    for rank, script in enumerate(scripts):
        script += [MARK, ("die",) if rank == culprit else ("sleep", FOREVER_S)]
    return Trial("ended", scripts, ("ended",), (frozenset({culprit}),))


HANGS: dict[str, Callable[[Draw], Trial]] = {
    "sleeps": lambda draw: _away(draw, "sleep"),
    "computes": lambda draw: _away(draw, "compute"),
    "skipped": _skipped,
    "orders": _orders,
    "receive": _receive,
    "circle": _circle,
    "stopped": _stopped,
    "chain": _chain,
    "ended": _ended,
}


def hanging(kind: str, seed: int, n_ranks: int) -> Trial:
    """Return the job of a kind that a seed draws."""
    return HANGS[kind](Draw(kind, seed, n_ranks))


# --- jobs that do not -----------------------------------------------------------------------------


def _calls(draw: Draw) -> Scripts:
    """Many small calls."""
    steps = [*draw.communicators(), ("repeat", 20, [*draw.work(40), BARRIER])]
    return [steps for _ in draw.everyone]


def _large(draw: Draw) -> Scripts:
    """Large arrays: up to 1 GB together, so that a call may take longer than the patience."""
    n = (1 << draw.randrange(24, 28)) // draw.n_ranks
    names = ("all_reduce", "broadcast", "scan", "all_gather")
    steps = [
        ("call", "world", name, n // (draw.n_ranks if name == "all_gather" else 1), 0, False)
        for name in draw.choices(names, k=4)
    ]
    return [steps for _ in draw.everyone]


def _uneven(draw: Draw) -> Scripts:
    """Ranks compute, or sleep, for up to half of the patience between calls."""
    scripts: Scripts = [[] for _ in draw.everyone]
    for _ in range(6):
        call = draw.call()
        for script in scripts:
            how, longest_s = draw.choice((("compute", 0.3), ("sleep", PATIENCE_S / 2)))
            script += [(how, draw.random() * longest_s), call]
    return scripts


def _messages(draw: Draw) -> Scripts:
    """Messages from rank to rank, in a ring: the even ranks send first."""
    scripts: Scripts = [[] for _ in draw.everyone]
    n = draw.choice((SMALL, 4000, LARGE, 1 << 22, (1 << 27) // draw.n_ranks))
    times = max(2, (1 << 24) // n // draw.n_ranks) if n > SMALL else 500
    for rank, script in enumerate(scripts):
        send = ("send", "world", (rank + 1) % draw.n_ranks, n, 2)
        receive = ("recv", "world", (rank - 1) % draw.n_ranks, n, 2)
        pair = [receive, send] if rank % 2 else [send, receive]
        if rank == draw.n_ranks - 1:
            pair = [receive, send]
        script.append(("repeat", times, pair))
    return scripts


def _pipeline(draw: Draw) -> Scripts:
    """Each rank waits for the one before, computes, and tells the next one."""
    scripts: Scripts = [[] for _ in draw.everyone]
    part_s = draw.uniform(0.3, 0.7) * PATIENCE_S / draw.n_ranks
    for rank, script in enumerate(scripts):
        before = [("recv", "world", rank - 1, SMALL, 4)] if rank else []
        behind = [("send", "world", rank + 1, SMALL, 4)] if rank < draw.n_ranks - 1 else []
        script.append(("repeat", 2, [*before, ("sleep", part_s), *behind]))
    return scripts


def _asynchronous(draw: Draw) -> Scripts:
    """Calls that another thread completes."""
    names = ("all_reduce", "broadcast", "all_gather")
    calls = [
        ("call", "world", name, draw.choice((SMALL, LARGE)) // 8, 0, True)
        for name in draw.choices(names, k=20)
    ]
    return [[("repeat", 5, [*calls, ("sleep", 0.1)])] for _ in draw.everyone]


def _churn(draw: Draw) -> Scripts:
    """Communicators come and go."""
    steps: list[Step] = []
    for turn in range(max(3, 32 // draw.n_ranks)):
        name, count = f"part {turn}", draw.randrange(1, 4)
        colors = [rank % count for rank in draw.everyone]
        steps.append(("split", name, "world", colors, [*draw.everyone]))
        steps += [draw.call(name), ("close", name), draw.call()]
    return [steps for _ in draw.everyone]


def _outside(draw: Draw) -> Scripts:
    """No rank is in a call for longer than the patience."""
    how = draw.choice((("sleep", PATIENCE_S + 1.5), ("compute", PATIENCE_S + 1.5)))
    steps = [*draw.work(), how]
    return [steps for _ in draw.everyone]


def _ending(draw: Draw) -> Scripts:
    """Ranks end at different times; each of them has made all its calls."""
    steps = draw.work()
    return [[*steps, BARRIER, ("sleep", draw.random() * 2)] for _ in draw.everyone]


HEALTHY: dict[str, Callable[[Draw], Scripts]] = {
    "calls": _calls,
    "large": _large,
    "uneven": _uneven,
    "messages": _messages,
    "pipeline": _pipeline,
    "asynchronous": _asynchronous,
    "churn": _churn,
    "outside": _outside,
    "ending": _ending,
}


def healthy(kind: str, seed: int, n_ranks: int) -> Trial:
    """Return the job of a kind that a seed draws."""
    return Trial(kind, HEALTHY[kind](Draw(kind, seed, n_ranks)))


# --- looking at them ------------------------------------------------------------------------------


def verdicts_on(
    pids: Sequence[int], moment_s: float = MOMENT_S, patience_s: float = PATIENCE_S
) -> Iterator[tuple[Verdict, Job]]:
    """Yield the verdict on each job of these processes, and the looks that it stands on."""
    found = segments.find(pids)
    try:
        for job in jobs_of(found.parts):
            if {*pids} & {*job[0].pids}:
                seen = look(job, moment_s)
                yield judge(seen, patience_s), seen
    finally:
        found.close()


Alarm = tuple[Verdict, Job] | None


def first_alarm(
    pool: Pool, trial: Trial, marks: Path, patience_s: float = PATIENCE_S, limit_s: float = 20.0
) -> Alarm:
    """Play a job that hangs; return the first verdict that calls for a look after it does.

    None: there was none within the limit, which counts from the hang on. The ranks still hang.
    """
    marks.write_bytes(b"." * trial.n_ranks)
    pids = _started(pool, trial, marks)
    until(lambda: b"." not in marks.read_bytes() or ranks_that_answered(pool), 120.0)
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        for verdict, job in verdicts_on(pids, patience_s=patience_s):
            if not verdict.is_healthy:
                return verdict, job
    return None


def false_alarm(pool: Pool, trial: Trial, marks: Path, patience_s: float = PATIENCE_S) -> Alarm:
    """Play a job that is healthy; return a verdict that says otherwise, if there is one."""
    marks.write_bytes(b"." * trial.n_ranks)
    pids, alarm = _started(pool, trial, marks), None
    while len(ranks_that_answered(pool)) < trial.n_ranks:
        for verdict, job in verdicts_on(pids, patience_s=patience_s):
            alarm = alarm or (None if verdict.is_healthy else (verdict, job))
        time.sleep(0.05)
    pool.results(120.0)
    return alarm


def _started(pool: Pool, trial: Trial, marks: Path) -> list[int]:
    pool.start(play, trial.scripts, marks, gives="seat")
    return [rank.pid for rank in pool.ranks]


def ranks_that_answered(pool: Pool) -> list[Any]:
    """Return the connections of the ranks that have answered, or ended."""
    return wait([rank.connection for rank in pool.ranks], 0)
