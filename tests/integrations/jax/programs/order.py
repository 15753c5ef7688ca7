"""The order of calls: in one function, in control flow, and of functions that run one by one."""

import random

import jax
import numpy as np
from checking import run, same
from jax import numpy as jnp

from gpucoll.integrations import jax as gcj


def check_independent_calls(comm):
    """Calls of one signature that do not depend on each other: another order is other numbers."""
    xs = [jnp.full(100_000, float(number)) * (comm.rank + 1) for number in range(20)]
    total = comm.world_size * (comm.world_size + 1) // 2

    @jax.jit
    def reduce_all(xs):
        return [gcj.all_reduce(x * 1.0) for x in reversed(xs)][::-1]

    for _ in range(10):
        for number, found in enumerate(reduce_all(xs)):
            same(found, np.full(100_000, float(number) * total))


def check_nested_functions(comm):
    inner = jax.jit(lambda x: (gcj.all_reduce(x), gcj.all_reduce(x + 1)))

    @jax.jit
    def outer(x):
        first = gcj.all_reduce(x + 10)
        second, third = inner(x)
        fourth, fifth = inner(x + 2)
        return first, second, third, fourth, fifth, gcj.all_reduce(x + 20)

    for _ in range(5):
        found = outer(jnp.zeros(50_000))
        for value, number in zip(found, (10, 0, 1, 2, 3, 20), strict=True):
            same(value, np.full(50_000, number * comm.world_size))


def check_unused_results(comm):
    """They run, and in their places: this ends by deadline if one rank leaves one out."""
    rank, size = comm.rank, comm.world_size

    @jax.jit
    def talk(x):
        gcj.barrier()
        gcj.all_reduce(x + 100)
        if size > 1 and rank == 0:
            gcj.send(x, 1)
        found = gcj.recv(0, like=x) if size > 1 and rank == 1 else x
        jax.jit(lambda x: gcj.all_reduce(x + 200))(x)
        jax.lax.scan(lambda c, _: (gcj.all_reduce(c), None), x, None, length=2)
        return found, gcj.all_reduce(x)

    for _ in range(5):
        found, total = talk(jnp.ones(1000))
        same(found, np.ones(1000))
        same(total, np.full(1000, size))

    @jax.jit
    def only_talk(x):
        gcj.all_reduce(x)
        gcj.barrier()

    for _ in range(5):
        only_talk(jnp.ones(10))
    gcj.flush()


def check_functions_one_after_the_other(comm):
    """JAX starts them and goes on: some wait for large results, and later ones are ready."""
    size = comm.world_size
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 100, lambda _, x: jnp.sin(x), x).sum() * 0)
    reduces = [jax.jit(lambda x, number=n: gcj.all_reduce(x + number)) for n in range(6)]
    square = jnp.ones((200, 200))
    for count in (8, 300_000):
        for _ in range(5):
            late = slow(square)
            found = [
                function(jnp.zeros(count) + late if number % 2 else np.zeros(count, np.float32))
                for number, function in enumerate(reduces)
            ]
            del late
            for number, value in enumerate(found):
                same(value, np.full(count, number * size, np.float32))


def check_control_flow(comm):
    size = comm.world_size

    @jax.jit
    def whole(x):
        def step(carry, number):
            first = gcj.all_reduce(carry + number)
            second = gcj.all_reduce(carry + number + 100)
            return second - first, (first, second)

        carry, seen = jax.lax.scan(step, x, jnp.arange(4.0))
        after = jax.lax.while_loop(
            lambda state: state[0] < 3,
            lambda state: (state[0] + 1, gcj.all_reduce(state[1]) / size + 1),
            (0, carry),
        )[1]
        branch = jax.lax.switch(2, [lambda x: x, gcj.scan, lambda x: gcj.all_reduce(x) + 1], after)
        return seen, after, branch, gcj.all_reduce(x)

    (first, second), after, branch, last = whole(jnp.zeros(3))
    carry, firsts = 0.0, []
    for number in range(4):
        firsts.append(size * (carry + number))
        carry = 100.0 * size
    same(first[:, 0], firsts)
    same(second[:, 0], np.array(firsts) + 100 * size)
    same(after, np.full(3, carry + 3))
    same(branch, np.full(3, (carry + 3) * size + 1))
    same(last, np.zeros(3))


def check_custom_derivatives(comm):
    @jax.custom_vjp
    def mean(x):
        return gcj.all_reduce(x) / comm.world_size

    mean.defvjp(lambda x: (mean(x), None), lambda _, g: (gcj.all_reduce(g),))
    found = jax.jit(jax.grad(lambda x: jnp.sum(mean(x) * (comm.rank + 1))))(jnp.ones(3))
    same(found, np.full(3, comm.world_size * (comm.world_size + 1) // 2))


# --- random programs ------------------------------------------------------------------------------

ROWS = 12
"""Divisible by 1, 2, 3 and 4 ranks."""


KINDS = (
    "add",
    "all_reduce",
    "max",
    "broadcast",
    "scan",
    "ring",
    "spread",
    "gather",
    "unused",
    "jit",
    "loop",
    "branch",
)


def random_program(seed, depth=2):
    """Return a list of steps, the same on all ranks; each changes one of three values."""
    chance = random.Random(seed)
    kinds = KINDS if depth else KINDS[:-3]
    steps = []
    for _ in range(chance.randint(2, 6)):
        kind = chance.choice(kinds)
        inner = (
            random_program(chance.random(), depth - 1)
            if kind in ("jit", "loop", "branch")
            else None
        )
        steps.append((kind, chance.randrange(3), chance.randrange(3), chance.randrange(9), inner))
    return steps


def in_jax(steps, values, comm):
    """Run a program on values of JAX."""
    rank, size = comm.rank, comm.world_size
    for kind, place, other, number, inner in steps:
        x, values = values[other], list(values)
        if kind == "add":
            found = x + values[place] * number + 1
        elif kind == "all_reduce":
            found = gcj.all_reduce(x)
        elif kind == "max":
            found = gcj.all_reduce(x, "max")
        elif kind == "broadcast":
            found = gcj.broadcast(x, number % size)
        elif kind == "scan":
            found = gcj.scan(x)
        elif kind == "ring":
            found = gcj.send_recv(x, (rank + 1) % size, (rank - 1) % size)
        elif kind == "spread":
            found = jnp.tile(gcj.reduce_scatter(x), size)
        elif kind == "gather":
            found = gcj.all_gather(x[number : number + 1])[number % size] + x
        elif kind == "unused":
            gcj.all_reduce(x + number)
            found = x
        else:
            values = with_control_flow(kind, inner, values, number, comm)
            continue
        values[place] = found
    return values


def with_control_flow(kind, inner, values, number, comm):
    if kind == "jit":
        return list(jax.jit(lambda *values: in_jax(inner, values, comm))(*values))
    if kind == "loop":
        step = lambda values, _: (in_jax(inner, values, comm), None)  # noqa: E731
        return list(jax.lax.scan(step, list(values), None, length=number % 3)[0])
    run_it = lambda values: list(in_jax(inner, values, comm))  # noqa: E731
    return list(jax.lax.cond(jnp.int32(number) > 3, run_it, list, list(values)))


def in_numpy(steps, ranks):
    """Run a program on the values of all ranks."""
    size = len(ranks)
    for kind, place, other, number, inner in steps:
        xs = [values[other] for values in ranks]
        if kind in ("jit", "loop", "branch"):
            times = {"jit": 1, "loop": number % 3, "branch": int(number > 3)}[kind]
            for _ in range(times):
                ranks = in_numpy(inner, ranks)
            continue
        total = np.sum(xs, axis=0, dtype=np.int32)
        block = ROWS // size
        found = {
            "add": [x + values[place] * number + 1 for x, values in zip(xs, ranks, strict=True)],
            "all_reduce": [total] * size,
            "max": [np.max(xs, axis=0)] * size,
            "broadcast": [xs[number % size]] * size,
            "scan": [np.sum(xs[: rank + 1], axis=0, dtype=np.int32) for rank in range(size)],
            "ring": [xs[rank - 1] for rank in range(size)],
            "spread": [
                np.tile(total[rank * block : (rank + 1) * block], size) for rank in range(size)
            ],
            "gather": [xs[number % size][number] + x for x in xs],
            "unused": xs,
        }[kind]
        ranks = [[*values] for values in ranks]
        for values, value in zip(ranks, found, strict=True):
            values[place] = np.asarray(value, np.int32)
    return ranks


def check_random_programs(comm):
    for seed in range(12):
        steps = random_program(seed)
        ranks = [
            [np.arange(ROWS, dtype=np.int32) * (place + 1) + rank for place in range(3)]
            for rank in range(comm.world_size)
        ]
        with np.errstate(over="ignore"):
            expected = in_numpy(steps, ranks)[comm.rank]
        function = jax.jit(lambda *values, steps=steps: in_jax(steps, values, comm))
        given = [jnp.asarray(x) for x in ranks[comm.rank]]
        started = [function(*given) for _ in range(3)]  # and nobody waits meanwhile
        for found in started:
            for value, right in zip(found, expected, strict=True):
                same(value, right)


if __name__ == "__main__":
    run(globals())
