"""The order of calls inside `jax.jit`: an ordered effect, whose token XLA sees as data.

XLA runs custom calls that do not depend on each other at the same time and in any order, whatever
they say of side effects. So every call takes a token and gives one, and the next call takes that.
JAX itself threads the token of an ordered effect through loops, branches and jitted functions that
others call, and keeps calls whose results nobody uses.

For an ordered effect JAX also carries a token from one execution to the next, in Python: 170 to 400
us for each call of a jitted function. Executions that one thread starts run one after another
anyway, on CPUs and on a GPU's stream. So a whole program begins with a token of its own:
`_cached_lowering_to_hlo` is given a program of one operation, which contains the real one and has
no effect. In a version of JAX that has no function of this name, JAX carries its tokens.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import jax
from jax._src import effects
from jax._src.interpreters import pxla
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

__all__ = ["ORDER", "carries_tokens_between_executions", "number_of_call", "register_lowering"]


class _Order(effects.Effect):
    """The effect of every call."""

    def __str__(self) -> str:
        return "gpucoll"


ORDER = _Order()
for _kinds in ("ordered", "lowerable", "control_flow_allowed", "custom_derivatives_allowed"):
    getattr(effects, f"{_kinds}_effects").add_type(_Order)
effects.remat_allowed_effects.add_type(_Order)


def register_lowering(primitive: Primitive, rule: Any, platform: str | None = None) -> None:
    """Register a lowering rule that is called for each equation, also for equal ones."""
    try:
        mlir.register_lowering(primitive, rule, platform=platform, cacheable=False)
    except TypeError:  # JAX 0.7 and older
        mlir.register_lowering(primitive, rule, platform=platform)


_program = Primitive("gpucoll_program")
_program.multiple_results = True


@_program.def_effectful_abstract_eval
def _results_of_program(*_: Any, program: Any) -> Any:
    return program.out_avals, program.effects - {ORDER}


def _lower_program(ctx: Any, *operands: Any, program: Any) -> Any:
    tokens = {effect: ctx.tokens_in.get(effect) for effect in ctx.tokens_in.effects()}
    inner = mlir.TokenSet({**tokens, ORDER: _first_token()})
    replaced = ctx.replace(tokens_in=inner)
    results = mlir.lower_fun(jaxpr_as_fun(program), multiple_results=True)(replaced, *operands)
    if tokens:
        after = {effect: replaced.tokens_out.get(effect) for effect in tokens}
        ctx.set_tokens_out(mlir.TokenSet(after))
    return results


def _first_token() -> Any:
    return mlir.TokenSet.create([ORDER]).get(ORDER)


register_lowering(_program, _lower_program)


def _begin_with_a_token(lower: Any) -> Any:
    """Return the lowering of whole programs, to which the effect is no longer visible."""

    @functools.wraps(lower)
    def lower_without_effect(closed_jaxpr: Any, *arguments: Any, **options: Any) -> Any:
        if ORDER not in getattr(closed_jaxpr, "effects", ()):
            return lower(closed_jaxpr, *arguments, **options)
        operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in closed_jaxpr.in_avals]
        whole = jax.make_jaxpr(lambda *x: _program.bind(*x, program=closed_jaxpr))(*operands)
        return lower(whole, *arguments, **options)

    return lower_without_effect


carries_tokens_between_executions = not hasattr(pxla, "_cached_lowering_to_hlo")
"""Whether this version of JAX makes each execution wait, in Python, for the one before."""
if not carries_tokens_between_executions:
    pxla._cached_lowering_to_hlo = _begin_with_a_token(pxla._cached_lowering_to_hlo)


class _Numbers:
    """How many calls a program has, on each communicator."""

    def __init__(self) -> None:
        self.counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def number_of_call(ctx: Any, comm: Any) -> int:
    """Return the number of the call that is being lowered: 1 for a program's first on `comm`."""
    kept = ctx.module_context.keepalives
    numbers = next((x for x in kept if isinstance(x, _Numbers)), None)
    if numbers is None:
        kept.append(numbers := _Numbers())
    number = numbers.counts.get(comm, 0) + 1
    numbers.counts[comm] = number
    return number
