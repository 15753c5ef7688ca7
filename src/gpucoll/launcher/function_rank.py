"""One rank of `gpucoll.launch`: read the call, make it, send the reply.

A fresh interpreter runs this as a file (``python function_rank.py CALL_DESCRIPTOR
REPLY_DESCRIPTOR``). It imports gpucoll only after setting the caller's ``sys.path``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import pickle
import sys
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpucoll.launcher.call import Join, Reply


def read_call(descriptor: int) -> tuple[list[str], list[str], bytes]:
    """Return the caller's sys.path and sys.argv, and the pickled call; see `call.store_call`."""
    # The file is mapped, not read, because all ranks share its file position.
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data:
        path, arguments, body = pickle.loads(data)
    os.close(descriptor)
    return path, arguments, body


def make_call(body: bytes) -> bytes:
    """Call the caller's function; return the pickled result."""
    import cloudpickle

    from gpucoll.errors import LaunchError

    try:
        join, function, args, kwargs = pickle.loads(body)
    except Exception as error:
        raise LaunchError(
            "the function or its arguments cannot be loaded in a fresh process: modules that they "
            f"refer to must be importable there ({type(error).__name__}: {error})"
        ) from error
    with (join or default_join())() as communicator:
        result = function(communicator, *args, **kwargs)
        try:
            # Before the communicator closes, since the result may be in memory that closing frees.
            return bytes(cloudpickle.dumps(result))
        except Exception as error:
            raise LaunchError(
                f"the function's result, a {type(result).__name__}, cannot be pickled "
                f"({type(error).__name__}: {error})"
            ) from error


def default_join() -> Join:
    """Return the function that makes the communicator."""
    import gpucoll

    return gpucoll.init


def failure(error: BaseException) -> Reply:
    """Return the reply that carries an exception to the caller."""
    import cloudpickle

    from gpucoll.launcher.call import Reply
    from gpucoll.tracebacks import shortened

    def pickled(value: object) -> bytes | None:
        with contextlib.suppress(Exception):
            return bytes(cloudpickle.dumps(value))
        return None

    with shortened(error):
        trace = from_the_function(error.__traceback__)
        shown = traceback.TracebackException(type(error), error, trace)
    return Reply(
        result=None,
        exception=pickled(error),
        parts=pickled((type(error), error.args, vars(error))),
        kind=type(error).__qualname__,
        text="".join(shown.format()).rstrip(),
        follows=follows_another(error),
    )


def from_the_function(trace: TracebackType | None) -> TracebackType | None:
    """Drop this file's own frames from a traceback, unless there are no others."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
        inner = inner.tb_next
    return inner or trace


def follows_another(error: BaseException) -> bool:
    """Return whether another rank's failure caused an exception or one in its chain."""
    from gpucoll.errors import AbortedError, PeerLostError
    from gpucoll.tracebacks import chain

    return any(isinstance(each, (AbortedError, PeerLostError)) for each in chain(error))


def main(call_descriptor: int, reply_descriptor: int) -> None:
    """Be one rank."""
    faulthandler.enable()  # so that a crash in native code prints a traceback to stderr
    os.set_inheritable(reply_descriptor, False)  # the function's own children must not keep it open
    path, arguments, body = read_call(call_descriptor)
    sys.path[:] = path
    sys.argv[:] = arguments
    from gpucoll.launcher.call import Reply, frame

    try:
        reply = Reply(result=make_call(body))
    except BaseException as error:
        reply = failure(error)
    with open(reply_descriptor, "wb") as pipe:
        pipe.write(frame(reply))


if __name__ == "__main__":
    if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):  # without -I or -P
        del sys.path[0]  # the files in it are not top-level modules
    main(int(sys.argv[1]), int(sys.argv[2]))
