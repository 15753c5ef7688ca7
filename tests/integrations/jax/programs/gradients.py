"""Derivatives: forward and reverse, beside what they are by hand."""

import jax
import numpy as np
from checking import refused, run, same
from jax import numpy as jnp

from gpucoll import ArgumentError, ReduceOp
from gpucoll.integrations import jax as gcj


def total(comm):
    return comm.world_size * (comm.world_size + 1) // 2


def check_all_reduce(comm):
    x, weight = jnp.arange(4.0), comm.rank + 1

    def loss(x, gradient="all_reduce", op="sum"):
        return jnp.sum(gcj.all_reduce(x, op, gradient=gradient) * weight)

    scaled = ReduceOp.scaled_sum(3.0)
    for wrap in (lambda f: f, jax.jit):
        same(wrap(jax.grad(loss))(x), np.full(4, total(comm)))
        same(wrap(jax.grad(lambda x: loss(x, "identity")))(x), np.full(4, weight))
        same(wrap(jax.grad(lambda x: loss(x, op=scaled)))(x), np.full(4, 3 * total(comm)))
        same(wrap(jax.grad(lambda x: loss(x, "identity", scaled)))(x), np.full(4, 3 * weight))
    value, tangent = jax.jvp(lambda x: gcj.all_reduce(x, gradient="identity"), (x,), (x * weight,))
    same(value, np.arange(4.0) * comm.world_size)
    same(tangent, np.arange(4.0) * total(comm))
    # The transpose of the transpose is the call itself.
    once = jax.linear_transpose(lambda x: gcj.all_reduce(x, gradient="identity"), x)
    twice = jax.linear_transpose(lambda x: once(x)[0], x)
    same(once(x)[0], np.arange(4.0))
    same(twice(x)[0], np.arange(4.0) * comm.world_size)
    hessian = jax.hessian(lambda x: jnp.sum(gcj.all_reduce(x) ** 2))(x)
    same(hessian, np.eye(4) * 2 * comm.world_size**2)


def check_trees(comm):
    tree = {"a": jnp.arange(3.0), "b": jnp.arange(2), "c": jnp.float32(1)}

    def loss(tree):
        found = gcj.all_reduce(tree)
        return jnp.sum(found["a"]) * (comm.rank + 1) + found["c"] * 2

    found = jax.jit(jax.grad(loss, allow_int=True))(tree)
    same(found["a"], np.full(3, total(comm)))
    same(found["c"], 2 * comm.world_size)


def check_movements(comm):
    size, rank = comm.world_size, comm.rank
    weight, x = rank + 1, jnp.arange(2.0 * size)
    ranks = np.repeat(np.arange(1.0, size + 1), 2)
    expected = {
        gcj.all_gather: np.full(2 * size, total(comm)),
        gcj.reduce_scatter: ranks,
        gcj.all_to_all: ranks,
        gcj.broadcast: np.full(2 * size, total(comm) if rank == 0 else 0),
        gcj.scatter: ranks if rank == 0 else np.zeros(2 * size),
    }
    for function, gradient in expected.items():

        def loss(x, function=function):
            return jnp.sum(function(x) * weight)

        same(jax.grad(loss)(x), gradient)
        same(jax.jit(jax.grad(loss))(x), gradient)
        value, tangent = jax.jvp(function, (x,), (2 * x,))
        same(tangent, 2 * np.asarray(value))
    same(jax.grad(lambda x: jnp.sum(gcj.all_gather(x) * weight))(1.0), total(comm))


def check_messages(comm):
    size, rank = comm.world_size, comm.rank
    after, before = (rank + 1) % size, (rank - 1) % size

    def loss(x):
        return jnp.sum(gcj.send_recv(x, after, before) * (rank + 1))

    same(jax.jit(jax.grad(loss))(jnp.ones(3)), np.full(3, after + 1))
    same(jax.grad(loss)(jnp.ones(3)), np.full(3, after + 1))


def check_batches_of_gradients(comm):
    xs = jnp.arange(6.0).reshape(3, 2)
    found = jax.jit(jax.vmap(jax.grad(lambda x: jnp.sum(gcj.all_reduce(x) ** 2))))(xs)
    same(found, 2 * comm.world_size**2 * np.arange(6.0).reshape(3, 2))
    same(jax.jacrev(gcj.all_reduce)(jnp.ones(2)), comm.world_size * np.eye(2))
    same(jax.jacfwd(gcj.all_reduce)(jnp.ones(2)), comm.world_size * np.eye(2))


def check_through_control_flow(comm):
    size = comm.world_size

    def loss(x):
        x, _ = jax.lax.scan(lambda x, _: (gcj.all_reduce(x) / size * 2, None), x, None, length=3)
        x = jax.checkpoint(lambda x: jnp.sin(gcj.all_reduce(x)) * x)(x)
        return jnp.sum(jax.lax.cond(x[0] >= 0, gcj.all_reduce, lambda x: x, x))

    x = jnp.full(2, 0.01)
    found = jax.jit(jax.grad(loss))(x)
    x8 = 8 * x
    each = jnp.sin(size * x8) + size * x8 * jnp.cos(size * x8)
    np.testing.assert_allclose(found, each * size * 8, rtol=1e-5)


def check_what_has_none(comm):
    x = jnp.ones(2 * comm.world_size)
    for function in (
        lambda x: gcj.all_reduce(x, "max"),
        lambda x: gcj.reduce_scatter(x, "prod"),
        gcj.gather,
        gcj.reduce,
        gcj.scan,
        lambda x: gcj.send(x, 0),
    ):

        def loss(x, function=function):
            found = function(x)
            return jnp.sum(x if found is None else found)

        text = refused(ArgumentError, jax.eval_shape, jax.grad(loss), x)
        assert "derivative" in text, text
    same(jax.grad(lambda x: jnp.sum(gcj.all_reduce(jax.lax.stop_gradient(x), "max") * x))(x), x)


if __name__ == "__main__":
    run(globals())
