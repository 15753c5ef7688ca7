"""`gpucoll.launch`: call a function on several ranks, from a notebook, a test or a program."""

from __future__ import annotations

import inspect
import numbers
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeVar

from gpucoll import config
from gpucoll.dependencies import check_dependencies
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.launcher.call import Join, store_call
from gpucoll.launcher.job import BIND_MODES, compile_kernels, obstacle_to
from gpucoll.launcher.launch_job import LaunchJob
from gpucoll.progress import say
from gpucoll.tracebacks import shorten_uncaught

if TYPE_CHECKING:
    from gpucoll.calls.given import AnyObject

__all__ = ["launch"]

_R = TypeVar("_R")

ELSEWHERE = ("n", "np", "nproc", "nprocs", "num_proc", "num_processes", "size", "world_size")
"""The name of the number of ranks in mpiexec, torchrun, Accelerate and others."""

DESCRIPTORS = 5  # open for each rank: those of gpucoll-run, and both ends of the pipe for its reply


def launch(
    function: Callable[..., _R],
    ranks: int = 4,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    timeout_s: float | None = None,
    bind: str = "auto",
    prefix: bool = True,
    **unknown: NoReturn,
) -> list[_R]:
    """Call ``function(comm, *args, **kwargs)`` on each of `ranks` new processes.

    Each rank is a fresh interpreter, not a fork, so this works in notebooks and alongside threads
    and GPUs. It has the caller's working directory, environment, ``sys.path`` and ``sys.argv``. The
    function and its arguments are pickled by cloudpickle, so lambdas, closures and functions
    defined in a notebook work.

    The interpreter runs with the caller's options (``-O``, ``-W``, ``-X dev``, ``-I``). The ranks'
    output goes to the caller's ``sys.stdout`` and ``sys.stderr``, in whole lines. Their standard
    input is empty.

    Parameters
    ----------
    function : callable
        Called with this rank's `Communicator`, then `args` and `kwargs`. The communicator is closed
        afterwards.
    ranks : int
        Number of ranks.
    args, kwargs : sequence, mapping
        Further arguments, the same on every rank.
    timeout_s : float, optional
        Seconds after which all ranks are ended. Default: no limit.
    bind : {"auto", "none"}
        Whether to bind ranks to disjoint sets of CPUs if there are enough. GPUCOLL_BIND=none takes
        precedence.
    prefix : bool
        Whether each line that a rank prints is prefixed with its rank: ``[2] text``.

    Returns
    -------
    list
        The function's results, in rank order.

    Raises
    ------
    Exception
        The exception of the first rank that failed. Its ``__cause__`` is a `LaunchError` with the
        rank and its traceback. Errors that follow from the loss of another rank (`PeerLostError`,
        `AbortedError`) are raised only if there is no other. After the first failure the other
        ranks have GPUCOLL_GRACE_S (5 s) to end by themselves.
    LaunchError
        The first rank that failed was killed by a signal or exited without returning; its exception
        cannot be pickled or is no `Exception` (such as SystemExit); or a result cannot be pickled.
    ArgumentError
        An argument is invalid, or there are more ranks than one host supports or the limits of this
        process allow (``ulimit -n``).
    DeadlineError
        Ranks had not finished after `timeout_s`; the message names them.

    Notes
    -----
    KeyboardInterrupt in the caller is forwarded to the ranks, which have the grace time to end. It
    is raised when all have ended; a second one kills them. No process, thread, descriptor or file
    is ever left behind. If the caller itself is killed, the kernel kills the ranks.
    """
    shorten_uncaught()
    check_dependencies()
    check_names(unknown)
    check_arguments(function, ranks, args, kwargs, timeout_s, bind)
    positional, named = tuple(args), dict(kwargs or {})
    check_call(function, positional, named)
    return run(function, int(ranks), positional, named, timeout_s, bind, prefix=prefix)


def check_names(unknown: Mapping[str, object]) -> None:
    """Raise if there are arguments that `launch` does not have."""
    for name, value in unknown.items():
        if name in ELSEWHERE:
            hint = f"the number of ranks is ranks={value!r}"
        else:
            hint = f"arguments of the function go into args=(...) or kwargs={{{name!r}: ...}}"
        raise ArgumentTypeError(f"gpucoll.launch: there is no argument {name!r}: {hint}")


def check_call(
    function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Raise unless the function accepts the communicator and these arguments."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # the function has no signature
        return
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError as error:
        name = name_of(function)
        further = ", *args, **kwargs" if args or kwargs else ""
        raise ArgumentTypeError(
            f"gpucoll.launch calls {name}(comm{further}), with the communicator first, but "
            f"{name}{signature} cannot be called this way: {error}"
        ) from None


def name_of(function: object) -> str:
    """Return a function's name for messages."""
    return getattr(function, "__qualname__", None) or repr(function)


def check_arguments(
    function: object, ranks: object, args: object, kwargs: object, timeout_s: object, bind: object
) -> None:
    """Raise if an argument is invalid, before any process is started."""
    if not callable(function):
        raise ArgumentTypeError(
            f"gpucoll.launch: expected a function; got a {type(function).__name__}"
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
    function: Callable[..., object],
    ranks: int,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    timeout_s: float | None,
    bind: str,
    join: Join | None = None,
    *,
    prefix: bool = False,
) -> list[AnyObject]:
    """Run `launch`; tests of the launcher alone pass a `join` in place of `gpucoll.init`."""
    try:
        call = store_call(function, args, kwargs, join)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise ArgumentTypeError(
            f"gpucoll.launch: the function or its arguments cannot be pickled: {error}"
        ) from error
    with call:
        if join is None:
            compile_kernels(say)
        return LaunchJob(name_of(function), ranks, timeout_s, prefix).execute(call, bind)
