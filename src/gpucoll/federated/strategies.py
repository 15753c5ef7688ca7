"""FedAvg, FedProx, FedOpt and SCAFFOLD: what clients and server compute in a round.

Each rank of a communicator is a client, and every rank computes what a server would. A server that
is not a rank, such as Flower's, calls the same functions with the means of its own `WeightedMean`.

Models are lists, tuples or dicts of arrays of NumPy, PyTorch, JAX or CuPy, which compute in their
own library and dtype; means are those of `WeightedMean`, of arrays in host memory. No function
changes an array that it is given.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field
from typing import Any

from gpucoll.api.agreement import agree, check_communicator
from gpucoll.api.communicator import Communicator
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.federated.aggregation import WeightedMean
from gpucoll.federated.layout import Arrays, map_arrays

__all__ = ["FedOpt", "Scaffold", "fed_avg", "fed_prox"]

KINDS = ("sgd", "adagrad", "adam", "yogi")


def fed_avg(comm: Communicator, arrays: Arrays, weight: float = 1) -> Arrays:
    """Return the weighted mean of the ranks' models (FedAvg, McMahan et al. 2017). Collective.

    Parameters
    ----------
    comm : Communicator
    arrays : list, tuple or dict of arrays
        This rank's model after its local steps.
    weight : int or float
        Such as the number of this rank's examples; 0 for a rank that does not take part, whose
        arrays are not read.

    Returns
    -------
    list, tuple or dict of arrays
        New arrays, the same bits on every rank.

    Raises
    ------
    ArgumentError, ArgumentTypeError, MismatchError, StateError
        As `WeightedMean` does, on every rank, before anything moves.

    Notes
    -----
    If each rank makes one step of gradient descent on all its examples, with its number of examples
    as weight, the result is a step of gradient descent on the examples of all ranks.
    """
    check_communicator(comm)
    try:
        mean = WeightedMean(arrays)
        mean.add(arrays, weight)
    except Exception as error:
        agree(comm, "fed_avg", error, {}, None)  # the other ranks wait in all_reduce
        raise
    mean.all_reduce(comm)
    return mean.result()


def fed_prox(gradients: Arrays, arrays: Arrays, common: Arrays, mu: float) -> Arrays:
    """Return a client's gradients with FedProx's term (Li et al. 2020): g + mu (w - common).

    The term is the gradient of ``mu / 2 * |w - common|**2``, which keeps a client near the model
    that it started from. The rest of a round is FedAvg's.

    Parameters
    ----------
    gradients, arrays, common : list, tuple or dict of arrays
        The gradients g of the client's loss at its weights w, and the weights that all clients had
        in common at the start of the round.
    mu : float
        At least 0. With 0 the gradients keep their bits.
    """
    mu = _check("mu", mu, 0, math.inf)
    if mu == 0:
        return map_arrays(lambda g: g, gradients)
    return map_arrays(lambda g, w, c: g + mu * (w - c), gradients, arrays, common)


@dataclass
class FedOpt:
    """A server's optimizer, whose gradient is the clients' mean progress (Reddi et al. 2021).

    Every rank, or the server alone, calls `step` with the same arrays and gets the same bits.

    Parameters
    ----------
    kind : str
        With d = mean of the clients' weights - common weights x, element by element:

        - "sgd": m = momentum * m + d; x = x + lr * m (FedAvg with momentum: Hsu et al. 2019)
        - "adagrad", "adam", "yogi": m = momentum * m + (1 - momentum) * d;
          x = x + lr * m / (sqrt(v) + tau), where v starts at tau**2 and is
          v + d**2, or decay * v + (1 - decay) * d**2, or v - (1 - decay) * d**2 * sign(v - d**2).
    lr : float
        The server's learning rate.
    momentum, decay : float
        From 0 to below 1: the paper's beta 1 and beta 2.
    tau : float
        How adaptive a step is: greater than 0.

    Notes
    -----
    "sgd" with ``lr=1`` and ``momentum=0`` returns the clients' mean itself: FedAvg, bit for bit.
    The state (m, and v) has the library and dtype of x.
    """

    kind: str = "adam"
    lr: float = 0.1
    momentum: float = 0.9
    decay: float = 0.99
    tau: float = 1e-3
    _m: Arrays = field(default=None, init=False, repr=False, compare=False)
    _v: Arrays = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError(f"kind must be one of {', '.join(KINDS)}; got {self.kind!r}")
        for name, most in (("lr", math.inf), ("momentum", 1), ("decay", 1), ("tau", math.inf)):
            setattr(self, name, _check(name, getattr(self, name), 0, most))
        if self.tau == 0:
            raise ArgumentError("tau must be greater than 0; got 0")

    def step(self, values: Arrays, mean: Arrays) -> Arrays:
        """Return the new common weights.

        Parameters
        ----------
        values : list, tuple or dict of arrays
            The common weights of this round.
        mean : list, tuple or dict of arrays
            The mean of the clients' weights, from `fed_avg` or `WeightedMean.result`.
        """
        if self.kind == "sgd" and self.lr == 1 and self.momentum == 0:
            return map_arrays(lambda x, y: y, values, mean)
        d = map_arrays(lambda x, y: y - x, values, mean)
        if self._m is None:
            self._m = map_arrays(lambda x: x * 0.0, d)
            self._v = map_arrays(lambda x: x * 0.0 + self.tau**2, d)
        share = 1 if self.kind == "sgd" else 1 - self.momentum
        self._m = map_arrays(lambda m, x: self.momentum * m + share * x, self._m, d)
        if self.kind == "sgd":
            return map_arrays(lambda x, m: x + self.lr * m, values, self._m)
        self._v = map_arrays(self._second_moment, self._v, d)
        return map_arrays(
            lambda x, m, v: x + self.lr * m / (v**0.5 + self.tau), values, self._m, self._v
        )

    def _second_moment(self, v: Any, d: Any) -> Any:
        if self.kind == "adagrad":
            return v + d * d
        if self.kind == "adam":
            return self.decay * v + (1 - self.decay) * (d * d)
        change = (1 - self.decay) * (d * d)
        return v - (v > d * d) * change + (v < d * d) * change  # keeps the dtype in all libraries


class Scaffold:
    """SCAFFOLD (Karimireddy et al. 2020): control variates against the drift of clients.

    A client that trains on its own moves towards its own optimum. SCAFFOLD estimates each client's
    gradient (`own`) and that of all (`common`), and adds the difference to each local step.

    Parameters
    ----------
    comm : Communicator
        Whose ranks are the clients.
    like : list, tuple or dict of arrays
        The model. The control variates start at 0.

    Attributes
    ----------
    own : list, tuple or dict of arrays
        This client's control variates c_i.
    common : list, tuple or dict of arrays
        The server's, c: the mean of those of all ranks, the same bits on every rank.

    Examples
    --------
    >>> scaffold = Scaffold(comm, weights)
    >>> for turn in range(rounds):
    ...     trained = weights
    ...     for _ in range(steps):
    ...         gradients = scaffold.gradients(gradients_of(trained))
    ...         trained = [w - lr * g for w, g in zip(trained, gradients)]
    ...     weights = scaffold.step(weights, trained, steps, lr)
    """

    def __init__(self, comm: Communicator, like: Arrays) -> None:
        self._comm = comm
        self.own = map_arrays(lambda x: x * 0.0, like)
        self.common = map_arrays(lambda x: x * 0.0, like)

    def gradients(self, gradients: Arrays) -> Arrays:
        """Return a client's gradients with SCAFFOLD's correction: g + (c - c_i)."""
        return map_arrays(lambda g, c, own: g + (c - own), gradients, self.common, self.own)

    def step(
        self,
        values: Arrays,
        trained: Arrays | None,
        steps: int,
        lr: float,
        *,
        server_lr: float = 1.0,
    ) -> Arrays:
        """Return the new common weights, and renew the control variates. Collective.

        Parameters
        ----------
        values : list, tuple or dict of arrays
            The common weights at the start of the round.
        trained : list, tuple or dict of arrays, or None
            This client's weights after its local steps; None if it does not take part.
        steps : int
            Its number of local steps.
        lr : float
            Its learning rate.
        server_lr : float
            How far the common weights move towards the clients' mean.

        Notes
        -----
        This is option II of the paper: c_i = c_i - c + (x - y_i) / (steps * lr). The mean of the
        weights counts each client that takes part once. c is the mean of all c_i, computed anew in
        each round, so that no rounding adds up in it.
        """
        try:
            server = FedOpt("sgd", lr=server_lr, momentum=0)
            own = self.own if trained is None else self._renewed(values, trained, steps, lr)
        except Exception as error:
            agree(self._comm, "Scaffold.step", error, {}, None)  # the others wait in fed_avg
            raise
        weight = 0 if trained is None else 1
        mean = fed_avg(self._comm, values if trained is None else trained, weight)
        common = fed_avg(self._comm, own)
        self.own, self.common = own, common
        return server.step(values, mean)

    def _renewed(self, values: Arrays, trained: Arrays, steps: int, lr: float) -> Arrays:
        """Return this client's control variates after its local steps."""
        way = _check("steps * lr", steps * lr, 0, math.inf)
        if way == 0:
            raise ArgumentError("steps and lr must be greater than 0")
        return map_arrays(
            lambda own, c, x, y: own - c + (x - y) / way, self.own, self.common, values, trained
        )


def _check(name: str, value: Any, least: float, most: float) -> float:
    """Return a number as Python's; raise unless it is in [least, most)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(f"{name} must be a number; got {value!r}")
    number = float(value)
    if not least <= number < most:
        raise ArgumentError(f"{name} must be at least {least} and below {most}; got {value}")
    return number
