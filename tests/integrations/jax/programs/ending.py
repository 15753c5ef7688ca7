"""A program that ends, as its child does, while calls that it has started have not run."""

import os
import signal
import warnings

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from jax import numpy as jnp

import gpucoll
from gpucoll.integrations import jax as gcj
from gpucoll.integrations.jax import ending

comm = gpucoll.init(timeout_s=20)
sines = jax.jit(lambda x: jax.lax.fori_loop(0, 100, lambda _, x: jnp.sin(x), x))
step = jax.jit(lambda x: gcj.all_reduce(sines(x)) / comm.world_size)
x = jnp.ones((300, 300))
for _ in range(20):
    x = step(x)
if comm.world_size > 1 and comm.rank < 2:
    jax.jit(lambda x: gcj.send_recv(x, 1 - comm.rank, 1 - comm.rank))(x)
print("the program is done", flush=True)

# A child that is forked has none of XLA's threads: its end does not wait for them.
warnings.simplefilter("ignore", RuntimeWarning)
if (child := os.fork()) == 0:
    ending._flush_and_tell()
    os._exit(0)
signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
signal.alarm(10)
print("the child ended with", os.waitpid(child, 0)[1], flush=True)
signal.alarm(0)
