"""The collectives on arrays, as users call them."""

from __future__ import annotations

from gpucoll.api.gathering import Gathering
from gpucoll.api.movements import Movements
from gpucoll.api.reductions import Reductions
from gpucoll.api.scans import Scans


class ArrayCollectives(Reductions, Scans, Gathering, Movements):
    """What `Communicator` can do with arrays.

    Every method takes these, described here once:

    out : array, optional
        Where the result goes: an array of x's library, dtype and device with as many elements as
        the result, in whatever shape. Default: a new array. Nothing else is ever written. It may be
        x itself or, where x is one block of the result or the result one block of x, exactly that
        block (in place); any other overlap is refused. Where the result is one block for each rank,
        it may be a list of these.
    async_op : bool
        Return a `Work` at once; input and output belong to it until it is done.
    timeout_s : float, optional
        Deadline of this call, in seconds. Default: the communicator's. For GPU arrays it counts
        from the call's start on the stream.
    stream : stream, optional
        For GPU arrays: where to run instead of the current stream of the arrays' library. A stream
        of CuPy, PyTorch or Numba, its handle, or anything with ``__cuda_stream__``.

    and raises:

    ArgumentError, ArgumentTypeError
        An argument cannot serve; nothing was sent.
    MismatchError
        The ranks did not make the same call.
    DeadlineError, PeerLostError
        A rank did not come in time, or is gone.
    BackendUnavailableError
        No backend of this communicator moves such arrays; `Communicator.describe` says why.

    A call on host arrays returns when it is done. One on GPU arrays is put on a stream and returns:
    what comes on that stream afterwards sees the result. What goes wrong there is raised later, by
    the next call, and for certain by `Work.synchronize`, `Communicator.check` and
    `Communicator.close`; nothing in an output may be trusted before.

    P is the number of ranks, r this rank, n the bytes of x. Costs are bytes that this rank moves
    through shared memory; arrays of `empty` are read where they lie instead.
    """
