"""oneCCL as a backend: NCCL's launches, with calls that block a thread in place of the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, cast

from gpucoll.backends.choice import HOST_DEVICE
from gpucoll.backends.gpu.compiled_call import Function
from gpucoll.backends.gpu.steps import Place
from gpucoll.backends.nccl.backend import IN_ORDER, NcclBackend
from gpucoll.backends.nccl.collectives import FunctionArguments, Launch, launch_of
from gpucoll.backends.nccl.elements import OPERATION, lack
from gpucoll.backends.oneccl.communicator import OneCclCommunicator
from gpucoll.backends.oneccl.library import spelled
from gpucoll.backends.oneccl.thread import Job, Watch
from gpucoll.backends.protocol import MessageRequest, Request
from gpucoll.errors import ArgumentTypeError

if TYPE_CHECKING:  # an optional library
    from gpucoll.devices.sycl import SyclDevice

NEVER_ON_INTEL = "gpucoll has never been executed on an Intel GPU"
DEADLINE = (
    "a call that is late is given up, and so is the communicator: oneCCL cannot end it, so its "
    "thread and the memory that it may write stay until the process ends"
)
_PROMISES = {
    "GPU: same bits on every rank": "as the library does it: not promised",
    "GPU: same bits run after run": "as the library does it: not promised",
    "GPU: same bits whatever size and placement": "no: the library chooses by size",
    "GPU: half types": "as the library adds them",
    "GPU: min and max of NaN": "as the library does them: a NaN may be lost",
}
_NOT_ON_HOST = ("avg", "scaled_sum")
"""Ops that the library's CPU plug-in lacks."""
_Calls = Sequence[tuple[str, FunctionArguments, int, int]]


class OneCclBackend(NcclBackend):
    """Moves arrays of Intel GPUs, or of Host devices, through oneCCL.

    Arguments are those of `NcclBackend`. On an Intel GPU a stream is a ``sycl::queue``, which the
    library gets. Host devices have none: a stream waits until the library's thread is done.
    """

    connection: OneCclCommunicator

    def __init__(
        self,
        connection: OneCclCommunicator,
        place: Place,
        new_watch: Callable[[], Watch],
        keeps_order: bool = False,
    ) -> None:
        super().__init__(connection, place, new_watch, keeps_order)
        self.is_on_host = connection.device.kind == HOST_DEVICE

    # --- preparing --------------------------------------------------------------------------------

    def prepare(self, request: Request) -> Launch:
        """Return the launch of a collective; ArgumentTypeError if nothing here can do it."""
        if not self.is_on_host:
            if reason := self._lack(request):
                name = request.collective.name.lower()
                raise ArgumentTypeError(
                    f"oneCCL cannot do this {name}: {reason}. gpucoll has no kernels for Intel "
                    "GPUs that could: copy to the host, where it works"
                )
            return launch_of(request, self._place, self.library)._replace(call=None)
        return super().prepare(request)._replace(call=None)

    def prepare_messages(self, requests: Sequence[MessageRequest]) -> Launch:
        """Return one launch for all these sends and receives."""
        return super().prepare_messages(requests)._replace(call=None)

    def _lack(self, request: Request) -> str:
        """Return why an Intel GPU cannot do a request; empty if it can."""
        op, dtype = request.op, request.data.dtype
        if request.compression is not None:
            return "compression= needs kernels"
        if op is None:
            return ""
        op.check_dtype(dtype)
        if op.name == "avg" and request.collective.is_scan:
            return "each rank has another divisor"
        if self._keeps_order and op.depends_on_order(dtype):
            return 'deterministic="order" needs kernels'
        return lack(op, dtype, self.library.vendor.name, self.library.version, 2)

    def _goes_by_kernels(self, request: Request) -> bool:
        if self.is_on_host and request.op is not None and request.op.name in _NOT_ON_HOST:
            request.op.check_dtype(request.data.dtype)
            return True
        return super()._goes_by_kernels(request)

    # --- enqueuing --------------------------------------------------------------------------------

    def _call(self, name: str, arguments: FunctionArguments, operation: int, stream: int) -> int:
        return self._make([(name, arguments, operation, stream)])

    def _enqueue_group(self, calls: Iterable[tuple[str, FunctionArguments, int, int]]) -> None:
        self._check(self._make(list(calls)), "ncclGroupEnd")

    def _make(self, calls: _Calls) -> int:
        """Make calls, as a group if there are several; return the first code that is not 0."""
        thread, watch = self.connection.thread, self._new_watch()
        if not self.is_on_host:
            return thread.call(lambda: self._run(calls), watch)
        job = Job(lambda: self._run(calls), calls[0][0])
        streams = tuple(dict.fromkeys(stream for *_, stream in calls))
        thread.enqueue(job, self.device, streams, watch)
        return 0

    def _run(self, calls: _Calls) -> int:
        """Make calls in the library's thread."""
        functions, handle = self._functions, self.connection.handle
        if not handle:
            return 0
        is_group, first = len(calls) > 1, 0
        if is_group and (code := functions.ncclGroupStart()):
            return int(code)
        for name, arguments, operation, stream in calls:
            given = (operation if item == OPERATION else item for item in arguments)
            queue = None if self.is_on_host else cast("SyclDevice", self.device).queue(stream)
            first = first or int(getattr(functions, name)(*given, handle, queue))
        ended = int(functions.ncclGroupEnd()) if is_group else 0
        return first or ended

    def _check(self, code: int, what: str) -> None:
        """Raise the error for a code."""
        self.library.check(code, spelled(what), self.connection.handle)

    def function(self, name: str, settings: Sequence[int]) -> Function:
        """Refuse: the library's calls may block, so none is made in one compiled step."""
        raise NotImplementedError(name)

    # --- the rest ---------------------------------------------------------------------------------

    def describe(self) -> dict[str, str]:
        """Return facts about this backend for the user: name -> sentence."""
        facts = super().describe()
        facts |= _PROMISES | (IN_ORDER if self._keeps_order else {})
        facts["GPU: a deadline"] = DEADLINE
        if self.is_on_host:
            facts["note"] = "host memory stands in for a GPU: " + NEVER_ON_INTEL
        else:
            facts["GPU: reductions that oneCCL lacks"] = "refused: there are no kernels for it"
            facts["note"] = NEVER_ON_INTEL
        return facts
