"""What a push does to a row: add, a step of gradient descent, an op, a user's function."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.kernels.cpu.addresses import (
    HALF_TYPES,
    descent_kernel,
    parameter_for,
    parts_per_element,
    reduce_kernel,
)
from gpucoll.types import ReduceOp
from gpucoll.wording import spelled_given

__all__ = ["SGD", "Adagrad", "Rule", "Update", "rule_of"]

_FLOATS = (*HALF_TYPES, "float32", "float64")
_NAMES = ("add", "sgd", "adagrad")
_NOT_FOR_ROWS = ("avg", "scaled_sum")


@dataclass(frozen=True)
class SGD:
    """Plain stochastic gradient descent: ``row -= lr * value``.

    Parameters
    ----------
    lr : float
        The learning rate.

    Notes
    -----
    For tables of real floats. Each operation is rounded as NumPy rounds it in the table's dtype;
    half types (float16, bfloat16, float8) are computed in float32 and rounded once.
    """

    lr: float = 0.01

    def __post_init__(self) -> None:
        _check_number("SGD: lr", self.lr)


@dataclass(frozen=True)
class Adagrad:
    """Adagrad (Duchi 2011), whose sums of squares lie beside the rows, in the table.

    ``sums += value * value; row -= lr * value / (sqrt(sums) + epsilon)``, element by element.

    Parameters
    ----------
    lr : float
        The learning rate.
    epsilon : float
        Added to the root, so that nothing is divided by zero.

    Notes
    -----
    For tables of real floats. Each operation is rounded as NumPy rounds it in the table's dtype.
    For half types (float16, bfloat16, float8) the sums are float32, the step is computed in
    float32, and the row is rounded once. The sums take as much memory as the rows, for half types
    more.
    """

    lr: float = 0.01
    epsilon: float = 1e-10

    def __post_init__(self) -> None:
        _check_number("Adagrad: lr", self.lr)
        _check_number("Adagrad: epsilon", self.epsilon)


Update: TypeAlias = "str | SGD | Adagrad | ReduceOp | Callable[[Any, Any], Any]"
"""What users pass as `update`."""


@dataclass(frozen=True)
class Rule:
    """An update, as `gpucoll.tables.loops.push_rows` needs it for rows of one dtype.

    Attributes
    ----------
    name : str
        Equal on ranks whose updates are equal.
    kernel : int
        The address of a kernel with the reduce kernel's arguments.
    parts : int
        How many of the things that the kernel counts an element has.
    parameter : ndarray
        What the kernel reads.
    sums_dtype : str or None
        The dtype of what the kernel keeps beside each row, one for each element.
    owner : object
        What keeps the kernel's machine code alive.
    """

    name: str
    kernel: int
    parts: int
    parameter: npt.NDArray[Any]
    sums_dtype: str | None = None
    owner: object = None


def rule_of(update: Update, dtype: str) -> Rule:
    """Return the rule of an update for rows of a dtype.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        It is not an update, or not defined for the dtype.
    """
    if update == "sgd":
        update = SGD()
    elif update == "adagrad":
        update = Adagrad()
    if isinstance(update, SGD | Adagrad):
        return _descent(update, dtype)
    op = ReduceOp.SUM if isinstance(update, str) and update == "add" else update
    if callable(op) and not isinstance(op, ReduceOp | type):
        op = ReduceOp.custom(op)
    if not isinstance(op, ReduceOp):
        raise ArgumentTypeError(
            f"update must be {', '.join(map(repr, _NAMES))}, SGD(lr), Adagrad(lr, epsilon), a "
            f"ReduceOp or a function of a row's element and a value; got {spelled_given(update)}"
        )
    if op.name in _NOT_FOR_ROWS:
        raise ArgumentError(
            f"update {op} also changes what is in the row, with each push: push scaled values"
        )
    op.check_dtype(dtype)
    nothing = parameter_for("float32", [0])
    if op.function is None:
        return Rule(str(op), reduce_kernel(dtype, op.name), parts_per_element(dtype), nothing)
    from gpucoll.kernels.cpu.custom import custom_kernel  # imports Numba

    kernel = custom_kernel(op, dtype)
    return Rule(f"{op} #{op.digest:x}", kernel.address, 1, nothing, owner=kernel)


def _descent(update: SGD | Adagrad, dtype: str) -> Rule:
    if dtype not in _FLOATS:
        raise ArgumentTypeError(
            f"update {update} is not defined for {dtype}: it works on {', '.join(_FLOATS)}"
        )
    is_adagrad = isinstance(update, Adagrad)
    epsilon = update.epsilon if isinstance(update, Adagrad) else 0.0
    held = "float64" if dtype == "float64" else "float32"
    return Rule(
        str(update),
        descent_kernel(dtype, is_adagrad),
        1,
        np.array([update.lr, epsilon], held),
        held if is_adagrad else None,
    )


def _check_number(what: str, given: Any) -> None:
    if isinstance(given, bool) or not isinstance(given, int | float | np.floating):
        raise ArgumentTypeError(f"{what} must be a number; got {spelled_given(given)}")
    if not math.isfinite(given) or given < 0:
        raise ArgumentError(f"{what} must be finite and at least 0; got {given!r}")
