"""Outer steps: from the mean of the ranks' pseudo-gradients to new parameters.

An outer step changes none of the vectors that it is given: after a loss the ones before it count.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from gpucoll import ArgumentError, ArgumentTypeError
from gpucoll.training.parameters import Vector

Memory: TypeAlias = dict[str, Any]
"""What an outer optimizer keeps of a fragment from step to step."""
OuterFunction: TypeAlias = Callable[[Vector, Vector, Memory], Vector]
"""``function(values, gradient, memory)`` returns new values, and may put arrays into `memory`."""

_NAMES = ("nesterov", "sgd")


@dataclass(frozen=True)
class State:
    """A fragment between two outer steps: the same bits on every rank but for the residual."""

    values: Vector
    memory: Memory = field(default_factory=dict)
    residual: Vector | None = None


@dataclass(frozen=True)
class Outer:
    """An outer optimizer: "nesterov", "sgd" (without momentum) or the program's function."""

    kind: str | OuterFunction
    lr: float
    momentum: float

    def __post_init__(self) -> None:
        if isinstance(self.kind, str) and self.kind not in _NAMES:
            raise ArgumentError(f"outer must be nesterov, sgd or a function; got {self.kind!r}")
        if not isinstance(self.kind, str) and not callable(self.kind):
            raise ArgumentTypeError(f"outer must be nesterov, sgd or a function; got {self.kind!r}")
        check_number("lr", self.lr, 0, math.inf)
        check_number("momentum", self.momentum, 0, 1)

    @property
    def has_momentum(self) -> bool:
        """Whether a step depends on those before it, as far as gpucoll knows."""
        return self.kind == "nesterov" and self.momentum != 0

    @property
    def averages(self) -> bool:
        """Whether a step leads to the mean of the ranks' parameters, whatever was before."""
        return isinstance(self.kind, str) and self.lr == 1 and not self.has_momentum

    def __str__(self) -> str:
        if isinstance(self.kind, str):
            return f"{self.kind}, lr={float(self.lr)}, momentum={float(self.momentum)}"
        return getattr(self.kind, "__qualname__", type(self.kind).__qualname__)

    def step(self, state: State, gradient: Vector) -> tuple[Vector, Memory]:
        """Return the values and memory after a step. `gradient` may be overwritten."""
        if not isinstance(self.kind, str):
            return self._step_of_program(state, gradient)
        memory: Memory = {}
        if self.has_momentum:
            factor = gradient.dtype.type(self.momentum)
            velocity = gradient
            if "velocity" in state.memory:
                velocity = state.memory["velocity"] * factor
                velocity += gradient
            memory["velocity"] = velocity
            ahead = velocity * factor
            ahead += gradient
            gradient = ahead
        gradient *= gradient.dtype.type(self.lr)
        return np.subtract(state.values, gradient, out=gradient), memory

    def _step_of_program(self, state: State, gradient: Vector) -> tuple[Vector, Memory]:
        assert callable(self.kind)
        memory = copy.deepcopy(state.memory)
        values = np.asarray(self.kind(state.values.copy(), gradient, memory), gradient.dtype)
        if values.shape != gradient.shape:
            raise ArgumentError(
                f"outer must return values of shape {gradient.shape}; got {values.shape}"
            )
        return values.copy(), memory


def check_number(name: str, value: Any, least: float, most: float) -> None:
    """Raise if an argument is no number between two others; infinity is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise ArgumentTypeError(f"{name} must be a number; got {value!r}")
    if not (least <= value <= most and math.isfinite(value)):
        raise ArgumentError(f"{name} must be in {least}..{most}; got {value}")
