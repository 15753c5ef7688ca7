"""Means of the ranks' parameters: once in many steps, or once."""

from __future__ import annotations

from collections.abc import Iterable

from gpucoll import Communicator, Compression
from gpucoll.api.agreement import agree, check_communicator
from gpucoll.training.diloco import DiLoCo
from gpucoll.training.parameters import AnyArray, Parameters


class LocalSGD(DiLoCo):
    """Training in which the ranks average their parameters once in many steps.

    It is `DiLoCo` with ``outer="sgd"`` and ``lr=1``; see there.

    Parameters
    ----------
    comm : Communicator
    parameters : iterable of arrays
    every : int
        Inner steps from one average to the next.
    compression : str or Compression, optional
    """

    def __init__(
        self,
        comm: Communicator,
        parameters: Iterable[AnyArray],
        *,
        every: int,
        compression: str | Compression | None = None,
    ) -> None:
        super().__init__(
            comm, parameters, every=every, outer="sgd", lr=1.0, compression=compression
        )


def average_parameters(comm: Communicator, parameters: Iterable[AnyArray]) -> list[AnyArray]:
    """Write the mean over the ranks to each array, as one all_reduce. Collective.

    Parameters
    ----------
    comm : Communicator
    parameters : iterable of arrays
        As in `DiLoCo`: also statistics of a model that are no parameters, if they are floats.

    Returns
    -------
    list of arrays
        The arrays that were given; for JAX new ones.

    Raises
    ------
    ArgumentError, ArgumentTypeError, MismatchError
        On every rank, before anything moves.
    """
    check_communicator(comm)
    problem, settings = None, {}
    try:
        found = Parameters(parameters)
        settings, vector = found.settings(), found.read()
    except Exception as error:
        problem = error
    agree(comm, "average_parameters", problem, settings, None)
    comm.all_reduce(vector, "avg", out=vector)
    found.write(vector)
    return found.arrays
