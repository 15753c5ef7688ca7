"""A communicator whose ranks are threads, and gpucoll's sessions on it."""

from __future__ import annotations

import functools
import pickle
import threading
from types import SimpleNamespace

import numpy as np

from gpucoll.bench.patterns import MEASURED
from gpucoll.bench.rank.own import Own
from gpucoll.bench.rank.session import Session
from gpucoll.types import ANY_SOURCE, ANY_TAG

RANKS = 3
ROOT = 1
DEADLINE_S = 20.0


class Pending:
    """A call that is made when it is waited for."""

    def __init__(self, call):
        self.call = call

    def wait(self):
        self.call()

    def done(self):
        return False


def may_be_asynchronous(method):
    """Let a method be called with ``async_op=True``."""

    @functools.wraps(method)
    def called(self, *arguments, async_op=False, **keywords):
        call = functools.partial(method, self, *arguments, **keywords)
        if async_op:
            self.started += 1
            return Pending(call)
        return call()

    return called


class Threads:
    """The communicator's methods, for one of several threads; what they say is what they do."""

    def __init__(self, rank, meeting):
        self.rank, self.world_size = rank, RANKS
        self.meeting = meeting
        self.started = 0

    def exchange(self, mine):
        """Return what every rank has given."""
        meeting = self.meeting
        meeting.given[self.rank] = pickle.loads(pickle.dumps(mine))  # a copy, as of a process
        meeting.barrier.wait(DEADLINE_S)
        everything = list(meeting.given)
        meeting.barrier.wait(DEADLINE_S)
        return everything

    def empty(self, shape, dtype):
        return np.empty(shape, dtype)

    def barrier(self):
        self.exchange(None)

    @may_be_asynchronous
    def all_reduce(self, x, op, *, out):
        if isinstance(x, list):
            assert [len(one) for one in x] == [len(one) for one in out] == [10] * 4
            for one, target in zip(x, out, strict=True):
                self.all_reduce(one, op, out=target)
            return
        out[:] = sum(self.exchange(x))

    @may_be_asynchronous
    def reduce(self, x, op, root, *, out):
        assert (out is not None) is (root == self.rank)
        result = sum(self.exchange(x))
        if out is not None:
            out[:] = result

    @may_be_asynchronous
    def broadcast(self, x, root, *, out):
        out[:] = self.exchange(x)[root]

    @may_be_asynchronous
    def all_gather(self, x, *, out):
        out[:] = np.concatenate(self.exchange(x))

    @may_be_asynchronous
    def gather(self, x, root, *, out):
        assert (out is not None) is (root == self.rank)
        result = np.concatenate(self.exchange(x))
        if out is not None:
            out[:] = result

    @may_be_asynchronous
    def reduce_scatter(self, x, op, *, out):
        out[:] = sum(self.exchange(x)).reshape(RANKS, -1)[self.rank]

    @may_be_asynchronous
    def scatter(self, x, root, *, out):
        assert (x is not None) is (root == self.rank)
        out[:] = self.exchange(x)[root].reshape(RANKS, -1)[self.rank]

    @may_be_asynchronous
    def all_to_all(self, x, *, out):
        blocks = [one.reshape(RANKS, -1)[self.rank] for one in self.exchange(x)]
        out[:] = np.concatenate(blocks)

    @may_be_asynchronous
    def scan(self, x, op, *, out):
        out[:] = sum(self.exchange(x)[: self.rank + 1])

    @may_be_asynchronous
    def exclusive_scan(self, x, op, *, out):
        out[:] = sum(self.exchange(x)[: self.rank])

    def send_recv(self, x, dest, source, *, out):
        assert dest == (self.rank + 1) % RANKS
        out[:] = self.exchange(x)[source]

    def broadcast_object(self, value, root):
        return self.exchange(value)[root]

    def gather_object(self, value, root):
        everything = self.exchange(value)
        return everything if root == self.rank else None

    def all_gather_object(self, value):
        return self.exchange(value)

    def scatter_object(self, values, root):
        assert (values is not None) is (root == self.rank)
        return self.exchange(values)[root][self.rank]

    def send(self, x, dest, tag=0, async_op=False):
        with self.meeting.arrived:
            self.meeting.messages[dest].append((self.rank, tag, np.array(x)))
            self.meeting.arrived.notify_all()
        self.started += async_op
        return Pending(lambda: None)

    @may_be_asynchronous
    def recv(self, out=None, source=ANY_SOURCE, tag=0):
        return self.message(source, tag, out)

    def probe(self, source=ANY_SOURCE, tag=ANY_TAG):
        return self.message(source, tag, stays=True)

    def message(self, source, tag, out=None, stays=False):
        """Return the first message that fits, or who has sent it if it stays."""
        messages = self.meeting.messages[self.rank]

        def fitting():
            return [
                one
                for one in messages
                if source in (ANY_SOURCE, one[0]) and tag in (ANY_TAG, one[1])
            ]

        with self.meeting.arrived:
            assert self.meeting.arrived.wait_for(fitting, DEADLINE_S)
            found = fitting()[0]
            if stays:
                return SimpleNamespace(source=found[0], tag=found[1])
            messages[:] = [one for one in messages if one is not found]
        if out is None:
            return found[2]
        out[:] = found[2]
        return out

    def __getattr__(self, name):
        if not name.startswith("plan_"):
            raise AttributeError(name)
        method = getattr(self, name.removeprefix("plan_"))
        return lambda *arguments, **keywords: lambda: method(*arguments, **keywords)


def sessions_of_threads():
    """Return a session for each rank."""
    meeting = SimpleNamespace(
        barrier=threading.Barrier(RANKS),
        arrived=threading.Condition(),
        given=[None] * RANKS,
        messages=[[] for _ in range(RANKS)],
    )
    return [Session(Own(Threads(rank, meeting))) for rank in range(RANKS)]


def on_all(sessions, command):
    """Return every rank's answer to a command."""
    answers = [None] * RANKS

    def answer(rank):
        answers[rank] = sessions[rank].answer(command)

    threads = [threading.Thread(target=answer, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    return answers


def prepare(sessions, collective, variants, **more):
    """Have the ranks prepare; return the cases."""
    traits = MEASURED[collective]
    command = {
        "do": "prepare", "collective": collective, "dtype": "int32" if traits.has_data else "none",
        "root": ROOT, "count": 30, "redop": "sum" if traits.reduces else "none",
        "variants": variants, **more,
    }  # fmt: skip
    first, *others = on_all(sessions, command)
    assert others == [first] * (RANKS - 1)
    return first["cases"]
