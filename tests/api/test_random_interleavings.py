"""Thousands of random messages, begun and awaited in any order, with collectives between them.

What each receive must get is said by a model in plain Python: messages of one sender and tag come
in the order sent, to the receives that ask for them in the order posted. A receive names its sender
and tag, so the model knows it without knowing who was faster.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from typing import Any

import numpy as np
import pytest
from tests.messages import place

TAGS = 3
SIZES = (0, 1, 2, 5, 100, 1500, 9000, 70_000)


class Model:
    """Which message each receive of one rank gets."""

    def __init__(self):
        self.sent = defaultdict(int)
        self.asked = defaultdict(int)

    def send(self, receiver, tag):
        self.sent[receiver, tag] += 1
        return self.sent[receiver, tag]

    def receive(self, sender, tag):
        self.asked[sender, tag] += 1
        return self.asked[sender, tag]


def size_of(sender, receiver, tag, number):
    """Return how many elements a message has: both sides know it."""
    return SIZES[(7 * sender + 5 * receiver + 3 * tag + number * number) % len(SIZES)]


def content(sender, tag, number):
    return (sender * TAGS + tag) * 100_000 + number


class Interleaving:
    """One rank's random calls; what all draw alike comes from `together`, the rest from `own`."""

    def __init__(self, comm, seed):
        self.comm, self.model = comm, Model()
        self.together, self.own = random.Random(seed), random.Random(seed * 1000 + comm.rank)
        self.pending, self.sends = [], deque[Any]()

    def run(self, n_steps):
        me = self.comm.rank
        for _ in range(n_steps):
            sender, receiver = (self.together.randrange(self.comm.world_size) for _ in range(2))
            tag, kind = self.together.randrange(TAGS), self.together.random()
            if kind < 0.12:
                self.collective(kind)
                continue
            if sender == me:
                self.send(receiver, tag)
            if receiver == me:
                self.receive(sender, tag)
            if self.own.random() < 0.3:
                self.look()
        self.settle()

    def send(self, receiver, tag):
        me, number = self.comm.rank, self.model.send(receiver, tag)
        way = self.own.choice(("private", "private", "shared"))
        x = place(self.comm, way, size_of(me, receiver, tag, number), "i4")
        x[:] = content(me, tag, number)
        synchronous = self.own.random() < 0.1
        work = self.comm.send(x, receiver, tag, synchronous=synchronous, async_op=True)
        self.sends.append((work, x))

    def receive(self, sender, tag):
        number = self.model.receive(sender, tag)
        count = size_of(sender, self.comm.rank, tag, number)
        how = self.own.random()
        if how < 0.2:
            work = self.comm.recv(source=sender, tag=tag, async_op=True)
        else:
            room = count + self.own.choice((0, 0, 3))
            work = self.comm.recv(np.full(room, -1, "i4"), sender, tag, async_op=True)
        self.pending.append((work, sender, tag, number, count))

    def check(self, item):
        work, sender, tag, number, count = item
        got = work.wait(60)
        where = f"rank {self.comm.rank} from {sender}, tag {tag}, message {number}"
        assert (got[:count] == content(sender, tag, number)).all(), where
        assert (got[count:] == -1).all(), where
        message = work.message
        assert (message.source, message.tag, message.count) == (sender, tag, count), where

    def look(self):
        """Ask about some, probe, and check what is done."""
        self.own.shuffle(self.pending)
        done = [item for item in self.pending[:8] if item[0].done()]
        self.pending = [item for item in self.pending if item not in done]
        for item in done:
            self.check(item)
        if (found := self.comm.probe(wait=False)) is not None:  # nobody has asked for it yet
            number = self.model.asked[found.source, found.tag] + 1
            count = size_of(found.source, self.comm.rank, found.tag, number)
            assert found.count == count, (found, number)
        while self.sends and self.sends[0][0].done():
            self.sends.popleft()[0].wait()

    def collective(self, kind):
        world_size = self.comm.world_size
        if kind < 0.04:
            self.comm.barrier()
        elif kind < 0.1:
            x = np.full(self.together.choice((1, 3000, 40_000)), self.comm.rank)
            total = self.comm.all_reduce(x)
            assert (total == world_size * (world_size - 1) // 2).all()
        else:
            root = self.together.randrange(world_size)
            assert self.comm.broadcast(np.full(5, self.comm.rank), root)[0] == root

    def settle(self):
        self.own.shuffle(self.pending)
        for item in self.pending:
            self.check(item)
        for work, _ in self.sends:
            work.wait(60)
        self.comm.barrier()
        assert self.comm.probe(wait=False) is None


def run_interleaving(comm, seed, n_steps):
    Interleaving(comm, seed).run(n_steps)
    return comm.all_reduce(1)


@pytest.mark.soak
@pytest.mark.parametrize(("world_size", "n_steps"), [(2, 4000), (3, 3000), (4, 2000), (7, 1200)])
def test_random_interleavings(ranks, world_size, n_steps):
    replies = ranks.call(world_size, run_interleaving, 11 + world_size, n_steps, limit_s=150)

    assert replies == [world_size] * world_size
