"""What goes wrong: errors with gpucoll's texts, and calls that work afterwards."""

import os
import threading

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import numpy as np
from checking import refused, run, same, text_of
from jax import numpy as jnp

import gpucoll
from gpucoll import ArgumentError, ArgumentTypeError, StateError
from gpucoll.integrations import jax as gcj

total = jax.jit(lambda x: gcj.all_reduce(x))


def check_mismatch(comm):
    for _ in range(2):
        text = text_of(total, jnp.ones(3 + comm.rank))
        assert "FAILED_PRECONDITION: MismatchError: the ranks did not make the same call" in text
        assert f"shape ({3 + comm.rank},)" in text
        same(total(jnp.ones(3)), np.full(3, comm.world_size))


def check_another_order(comm):
    """Two calls of one signature, in another order on one rank."""

    def swapped(x, y):
        if comm.rank:
            second, first = gcj.all_reduce(y, "max"), gcj.all_reduce(x)
        else:
            first, second = gcj.all_reduce(x), gcj.all_reduce(y, "max")
        return first, second

    text = text_of(jax.jit(swapped), jnp.ones(4), jnp.zeros(4))
    assert "MismatchError" in text, text
    # Here rank 0's program has one call more: the others' first call meets its second.
    first, second = (
        jax.jit(lambda x: gcj.all_reduce(x)),
        jax.jit(lambda x: (gcj.all_reduce(x), gcj.all_reduce(x))[1]),
    )
    text = text_of(lambda x: (first(x), first(x)) if comm.rank else second(x), jnp.ones(4))
    assert "which operator of a compiled program this is" in text, text
    same(total(jnp.ones(3)), np.full(3, comm.world_size))


def check_arguments(comm):
    text = refused(ArgumentTypeError, total, jax.random.key(0))
    assert "key<fry>" in text, text
    assert "do not travel" in refused(ArgumentTypeError, gcj.all_gather, jax.random.key(0))
    assert "rows" in refused(ArgumentError, gcj.reduce_scatter, jnp.ones(comm.world_size + 1))
    assert "no rows" in refused(ArgumentError, gcj.all_to_all, jnp.float32(1))
    assert "root must be a rank" in refused(ArgumentError, gcj.broadcast, jnp.ones(1), 9)
    assert "static_argnums" in refused(ArgumentTypeError, jax.jit(gcj.broadcast), jnp.ones(1), 0)
    assert "gradient" in refused(
        ArgumentError, lambda: gcj.all_reduce(jnp.ones(1), gradient="mean")
    )
    assert "tag" in refused(ArgumentError, gcj.send, jnp.ones(1), 0, -5)
    assert "like=" in refused(ArgumentError, gcj.recv)
    assert "one array" in refused(ArgumentTypeError, gcj.all_gather, [jnp.ones(1)])
    assert "comm must be" in refused(
        ArgumentTypeError, lambda: gcj.all_reduce(jnp.ones(1), comm=jnp)
    )


def check_several_devices(comm):
    """A rank has one device; JAX has no rule for more, and a program of more is refused."""
    assert jax.local_device_count() == 2
    text = refused((StateError, ValueError), jax.pmap(gcj.all_reduce), jnp.ones((2, 3)))
    assert "2 devices of one process" in text or "not supported in `pmap`" in text  # JAX 0.5
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    text = refused(StateError, total, jax.device_put(jnp.ones(4), spread))
    assert "use_for_processes" in text
    same(total(jax.device_put(jnp.ones(3), jax.devices()[1])), np.full(3, comm.world_size))


def check_calls_without_results(comm):
    """A flush tells of them, once."""

    @jax.jit
    def wait(x):  # with a loop, so that JAX starts it and goes on
        jax.lax.fori_loop(0, 4, lambda _, x: x @ gcj.send_recv(x, 0, 0, comm=alone), x)
        gcj.barrier()

    alone = comm.split(comm.rank)
    if comm.rank == 0:
        wait(jnp.ones((64, 64)))
        text = refused(gpucoll.BackendError, gcj.flush)
        assert "has no result failed: MismatchError" in text, text
    else:
        assert "MismatchError" in text_of(total, jnp.ones(3))
    gcj.flush()
    alone.close()
    same(total(jnp.ones(3)), np.full(3, comm.world_size))


def check_threads(comm):
    """Each has a communicator of its own."""
    comms, found = [comm.duplicate() for _ in range(3)], {}

    def call(number):
        function = jax.jit(lambda x: gcj.all_reduce(x, comm=comms[number]))
        for _ in range(20):
            found[number] = function(jnp.full(1000, float(number)))

    for one in comms:  # the first call on a communicator is collective
        gcj.barrier(comm=one)
    threads = [threading.Thread(target=call, args=[number]) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(3):
        same(found[number], np.full(1000, float(number * comm.world_size)))
        comms[number].close()


def check_the_end(comm):
    mine = comm.duplicate()
    function = jax.jit(lambda x: gcj.all_reduce(x, comm=mine))
    for _ in range(10):
        last = function(jnp.ones(100_000))
    mine.close()  # waits for them
    same(last, np.full(100_000, comm.world_size))
    assert "closed" in text_of(function, jnp.ones(100_000))
    assert "closed" in refused(StateError, function, jnp.ones(3))


if __name__ == "__main__":
    assert "gpucoll.init()" in refused(StateError, gcj.all_reduce, jnp.ones(1))
    run(globals())
