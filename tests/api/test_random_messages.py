"""Two thousand random messages and collectives, every result compared; the seed is in the test."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.messages import place

from gpucoll import ANY_TAG


class Traffic:
    """Random messages among random collectives: every rank draws the same numbers."""

    def __init__(self, comm, seed):
        self.comm, self.random, self.number = comm, random.Random(seed), 0
        self.pending = []

    def do(self, n_steps):
        steps = [self.ring] * 4 + [self.pair] * 4 + [self.several] * 2 + [self.reduce] * 6
        for self.number in range(n_steps):
            self.random.choice([*steps, self.gather, self.comm.barrier, self.settle])()
        self.settle()

    def array(self, size, sender, *, is_empty=False):
        way = self.random.choice(("private", "private", "shared"))
        x = place(self.comm, way, size, "i4")
        x[:] = -1 if is_empty else self.number * 100 + sender
        return x

    def compare(self, number, sender, out):
        where = f"step {number}, rank {self.comm.rank} from {sender}, size {out.size}"
        assert (out == number * 100 + sender).all(), where

    def draw(self):
        return self.random.choice((0, 1, 5, 300, 2048, 2049, 20_000, 60_000))

    def ring(self):
        me, count, size = self.comm.rank, self.comm.world_size, self.draw()
        step, tag = self.random.randrange(1, count), self.random.randrange(4)
        to, source = (me + step) % count, (me - step) % count
        x, out = self.array(size, me), self.array(size, source, is_empty=True)
        is_async = self.random.random() < 0.4
        result = self.comm.send_recv(x, to, source, out, tag=tag, async_op=is_async)
        if is_async:
            self.pending.append((result, self.number, source, out))
        else:
            self.compare(self.number, source, out)

    def pair(self):
        """One rank sends to another, some at once and some not."""
        sender, receiver = self.random.sample(range(self.comm.world_size), 2)
        sizes = [self.draw() for _ in range(self.random.randrange(1, 4))]
        tag, is_async = self.random.randrange(4), self.random.random() < 0.5
        source, asked = self.random.choice(((sender, tag), (sender, tag), (sender, ANY_TAG)))
        may_be_any = not self.pending and not is_async
        for size in sizes:
            x, out = self.array(size, sender), self.array(size, sender, is_empty=True)
            if self.comm.rank == sender:
                work = self.comm.send(x, receiver, tag, async_op=is_async)
                self.pending += [(work, 0, 0, np.zeros(0))] if is_async else []
            elif self.comm.rank == receiver:
                wanted = asked if may_be_any else tag
                work = self.comm.recv(out, source, wanted, async_op=is_async)
                if is_async:
                    self.pending.append((work, self.number, sender, out))
                else:
                    self.compare(self.number, sender, out)

    def several(self):
        me, count, size = self.comm.rank, self.comm.world_size, self.draw()
        outs = [self.array(size, peer, is_empty=True) for peer in range(count)]
        xs = [self.array(size, me) for _ in range(count)]
        with self.comm.group():
            for peer in range(count):
                self.comm.recv(outs[peer], peer, 2)
            for peer in range(count):
                self.comm.send(xs[peer], peer, 2)
        for peer, out in enumerate(outs):
            self.compare(self.number, peer, out)

    def reduce(self):
        count, size = self.comm.world_size, self.draw()
        x = self.array(size, self.comm.rank)
        is_async = self.random.random() < 0.3
        work = self.comm.all_reduce(x, async_op=is_async)
        total = work.wait() if is_async else work
        assert (total == count * self.number * 100 + count * (count - 1) // 2).all()

    def gather(self):
        root = self.random.randrange(self.comm.world_size)
        got = self.comm.broadcast(self.array(self.draw(), self.comm.rank), root)
        self.compare(self.number, root, got)

    def settle(self):
        self.random.shuffle(order := list(range(64)))
        self.pending.sort(key=lambda item: order[item[1] % 64])
        for work, number, sender, out in self.pending:
            work.wait()
            self.compare(number, sender, out)
        self.pending.clear()


def run_traffic(comm, seed):
    Traffic(comm, seed).do(2000)
    return comm.all_reduce(1)


@pytest.mark.parametrize("world_size", [2, 3])
def test_random_traffic(ranks, world_size):
    replies = ranks.call(world_size, run_traffic, 7 + world_size, limit_s=100)

    assert replies == [world_size] * world_size
