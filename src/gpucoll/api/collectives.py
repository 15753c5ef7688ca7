"""The collectives on arrays, as users call them."""

from __future__ import annotations

from gpucoll.api.gathering import Gathering
from gpucoll.api.movements import Movements
from gpucoll.api.reductions import Reductions
from gpucoll.api.scans import Scans


class ArrayCollectives(Reductions, Scans, Gathering, Movements):
    """The collectives of `Communicator` on arrays.

    Every method accepts these arguments:

    out : array, optional
        Destination array: any shape with as many elements as the result, and x's library, dtype and
        device. Default: a new array. Nothing else is ever written to. In place: pass x itself; if
        one of the two is a block of the other, pass exactly this rank's block. Any other overlap is
        refused. If the result has one block for each rank, `out` may be a list of blocks.
    async_op : bool
        Return a `Work` at once; input and output belong to it until it is done.
    timeout_s : float, optional
        Deadline of this call, in seconds. Default: the communicator's. For GPU arrays it counts
        from the call's start on the stream.
    stream : stream, optional
        For GPU arrays: the stream to run on. Default: the current stream of the arrays' library. A
        stream of CuPy, PyTorch or Numba, its handle, or any object with ``__cuda_stream__``.

    and raises:

    ArgumentError, ArgumentTypeError
        An argument is invalid; nothing was sent.
    MismatchError
        The ranks did not make the same call.
    DeadlineError, PeerLostError
        A rank did not arrive in time, or its process is gone.
    BackendUnavailableError
        No backend of this communicator moves these arrays; `Communicator.describe` says why.

    A call on host arrays returns when it is done. A call on GPU arrays is enqueued on a stream and
    returns; work enqueued on that stream afterwards sees the result. A failure there is raised
    later: perhaps by the next call, and certainly by `Work.synchronize`, `Communicator.check` and
    `Communicator.close`. Until one of these has returned, results may be undefined.

    P is the number of ranks, r this rank, n the bytes of x. Costs are the bytes that this rank
    moves through shared memory. Arrays made by `empty` are read in place instead.
    """
