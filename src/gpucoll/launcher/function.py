"""`gpucoll.launch`: call a function on several ranks, from a notebook, a test or a program."""

from __future__ import annotations

import inspect
import numbers
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from gpucoll import config
from gpucoll.dependencies import check_dependencies
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.launcher.call import Join, store_call
from gpucoll.launcher.job import BIND_MODES, compile_kernels, obstacle_to
from gpucoll.launcher.launch_job import LaunchJob
from gpucoll.tracebacks import shorten_uncaught

__all__ = ["launch"]

_R = TypeVar("_R")

ELSEWHERE = ("n", "np", "nproc", "nprocs", "num_proc", "num_processes", "size", "world_size")
"""What mpiexec, torchrun, Accelerate and others call the number of ranks."""

DESCRIPTORS = 5  # open for each rank: those of gpucoll-run, and both ends of the pipe for its reply


def launch(
    function: Callable[..., _R],
    ranks: int = 4,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    bind: str = "auto",
    prefix: bool = True,
    **unknown: NoReturn,
) -> list[_R]:
    """Call ``function(comm, *args, **kwargs)`` on each of `ranks` new processes.

    Each rank is a fresh interpreter, not a fork, so it works from notebooks and beside threads and
    GPUs. It has the caller's working directory, environment, ``sys.path`` and ``sys.argv``. The
    function and its arguments travel by cloudpickle: lambdas, closures and what is defined in a
    notebook will do.

    The interpreter runs under the caller's options (``-O``, ``-W``, ``-X dev``, ``-I``). What the
    ranks print goes to the caller's ``sys.stdout`` and ``sys.stderr``, in whole lines. Their
    standard input is empty.

    Parameters
    ----------
    function : callable
        Gets this rank's `Communicator`, which is closed after it, then `args` and `kwargs`.
    ranks : int
        Number of ranks.
    args, kwargs : sequence, mapping
        Further arguments, the same on every rank.
    timeout_s : float, optional
        Seconds after which all ranks are ended; by default there is no limit.
    bind : {"auto", "none"}
        Whether to bind ranks to disjoint sets of CPUs where there are enough. GPUCOLL_BIND=none
        goes before it.
    prefix : bool
        Whether each line that a rank prints begins with its rank: ``[2] text``.

    Returns
    -------
    list
        What the function returned, in the order of the ranks.

    Raises
    ------
    Exception
        What the first rank that failed raised, as it was; its ``__cause__`` is a `LaunchError` with
        the rank and the traceback there. A rank that failed by itself goes before those that failed
        since they had lost a rank (`PeerLostError`, `AbortedError`). After the first failure the
        others have GPUCOLL_GRACE_S (5 s) to end by themselves.
    LaunchError
        The first rank that failed was killed by a signal or exited without returning; or what it
        raised cannot be pickled or is no `Exception`, such as SystemExit; or a result cannot be
        pickled.
    ArgumentError
        An argument cannot serve; also more ranks than one host has, or than the limits of this
        process allow (``ulimit -n``).
    DeadlineError
        Ranks had not finished after `timeout_s`: the message names them.

    Notes
    -----
    KeyboardInterrupt in the caller is handed on to the ranks, which have the grace time to end, and
    is raised when all have. A second one kills them. However it ends, no process, thread,
    descriptor or file is left; and should the caller itself be killed, the kernel kills the ranks.
    """
    shorten_uncaught()
    check_dependencies()
    check_names(unknown)
    check_arguments(function, ranks, args, kwargs, timeout_s, bind)
    positional, named = tuple(args), dict(kwargs or {})
    check_call(function, positional, named)
    return run(function, int(ranks), positional, named, timeout_s, bind, prefix=prefix)


def check_names(unknown: Mapping[str, object]) -> None:
    """Refuse arguments that `launch` does not have."""
    for name, value in unknown.items():
        if name in ELSEWHERE:
            hint = f"the number of ranks is ranks={value!r}"
        else:
            hint = f"what the function gets goes into args=(...), or kwargs={{{name!r}: ...}}"
        raise ArgumentTypeError(f"gpucoll.launch: there is no argument {name!r}: {hint}")


def check_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a function that does not take the communicator and these arguments."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # one that does not say what it takes
        return
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError as error:
        name = name_of(function)
        further = ", *args, **kwargs" if args or kwargs else ""
        raise ArgumentTypeError(
            f"gpucoll.launch: it calls {name}(comm{further}), with the communicator first, but "
            f"{name}{signature} cannot be called so: {error}"
        ) from None


def name_of(function: object) -> str:
    """Return what errors call a function."""
    return getattr(function, "__qualname__", None) or repr(function)


def check_arguments(
    function: object, ranks: object, args: object, kwargs: object, timeout_s: object, bind: object
) -> None:
    """Refuse what cannot serve, before any process is started."""
    if not callable(function):
        raise ArgumentTypeError(
            f"gpucoll.launch: a function is needed, not a {type(function).__name__}"
        )
    if isinstance(ranks, bool) or not isinstance(ranks, numbers.Integral):
        raise ArgumentTypeError(f"gpucoll.launch: ranks must be an int, not {ranks!r}")
    if ranks < 1:
        raise ArgumentError(f"gpucoll.launch: at least 1 rank is needed, not {ranks}")
    if obstacle := obstacle_to(int(ranks), DESCRIPTORS):
        raise ArgumentError(f"gpucoll.launch: {obstacle}")
    if not isinstance(args, (tuple, list)):
        raise ArgumentTypeError(
            f"gpucoll.launch: args must be a tuple or list, not a {type(args).__name__}"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ArgumentTypeError(
            f"gpucoll.launch: kwargs must be a mapping, not a {type(kwargs).__name__}"
        )
    config.check_timeout_s(timeout_s, "gpucoll.launch: ", may_be_endless=True)
    if bind not in BIND_MODES:
        raise ArgumentError(
            f"gpucoll.launch: bind must be one of {', '.join(BIND_MODES)}, not {bind!r}"
        )


def run(
    function: Callable[..., Any],
    ranks: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout_s: float | None,
    bind: str,
    join: Join | None = None,
    *,
    prefix: bool = False,
) -> list[Any]:
    """Do `launch`; `join` stands in for `gpucoll.init` where the launcher alone is tested."""
    try:
        call = store_call(function, args, kwargs, join)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise ArgumentTypeError(
            f"gpucoll.launch: the function or its arguments cannot be pickled: {error}"
        ) from error
    with call:
        if join is None:
            compile_kernels(lambda line: print(line, file=sys.stderr, flush=True))
        return LaunchJob(name_of(function), ranks, timeout_s, prefix).execute(call, bind)
