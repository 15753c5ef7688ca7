"""Addresses in the state that the compiled loops over connections share: rows, links, fields."""

from __future__ import annotations

from gpucoll.blocks import Words
from gpucoll.kernels.cpu.jit import inline
from gpucoll.transport.tcp.stream_words import Link, Plan, Row, State

IDLE, MOVED = -2, -1
"""The result of one turn of a link; otherwise it is a `StreamStatus` that ends the call."""


@inline
def row_of(state: State, number: int) -> Row:
    """Return a row."""
    return Row(state.rows + Row.n_bytes * number)


@inline
def plan_of(state: State, number: int) -> Plan:
    """Return the loop's fields of a row."""
    return Plan(state.plan + Plan.n_bytes * number)


@inline
def link_of(state: State, number: int) -> Link:
    """Return a link."""
    return Link(state.links + Link.n_bytes * number)


@inline
def go_on(state: State, first: int, done: int) -> None:
    """Advance the field `first` to the first row whose field `done` is 0."""
    firsts = Words(state.address)
    number = firsts[first]
    while number < state.n_rows and Words(plan_of(state, number).address)[done] != 0:
        number += 1
    firsts[first] = number
