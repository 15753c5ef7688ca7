"""The checks of order as they run where JAX carries a token from one execution to the next."""

from jax._src.interpreters import pxla

lower = pxla._cached_lowering_to_hlo

import order  # noqa: E402
from checking import run  # noqa: E402

from gpucoll.integrations.jax import ordering  # noqa: E402

assert not ordering.carries_tokens_between_executions
pxla._cached_lowering_to_hlo = lower

if __name__ == "__main__":
    run(vars(order))
