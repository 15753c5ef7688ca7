"""How the calls of a process group run, blocking or started, and how torch's options are read."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.autograd import profiler

import gpucoll
from gpucoll import Communicator, GpucollError, ReduceOp, StateError
from gpucoll.integrations.torch.batches import BATCHED, Batches
from gpucoll.integrations.torch.errors import ArgumentError, as_torchs
from gpucoll.integrations.torch.exchanges import Exchanges
from gpucoll.integrations.torch.options import Options
from gpucoll.integrations.torch.ranges import method_of_caller, within_ranges
from gpucoll.integrations.torch.tensors import Outputs
from gpucoll.integrations.torch.works import Finished, Started, Work, seconds

if TYPE_CHECKING:
    from gpucoll.calls.given import AnyResult

_NUMBERED = {
    hash(op): name
    for op, name in (
        (dist.ReduceOp.SUM, "sum"),
        (dist.ReduceOp.AVG, "avg"),
        (dist.ReduceOp.PRODUCT, "prod"),
        (dist.ReduceOp.MIN, "min"),
        (dist.ReduceOp.MAX, "max"),
        (dist.ReduceOp.BAND, "band"),
        (dist.ReduceOp.BOR, "bor"),
        (dist.ReduceOp.BXOR, "bxor"),
    )
}
"""Names of ops by their hash, which is an op's number in C++. Comparing ops takes 2 us, a lookup
here 0.1."""
_NO_TIMEOUT = c10d.AllreduceOptions().timeout
DONE = Finished([])
"""What a blocking call returns."""
Tensors = list[torch.Tensor]
Lists: TypeAlias = Any
"""The tensors of all ranks: a list, or a list that contains this list."""
AnyOptions: TypeAlias = Any
"""torch's options of a call; or, from some of torch's functions, the root or the timeout itself."""
AnyOp: TypeAlias = Any
"""A reduce op of torch's, which has two classes of them; None for a sum."""


class Calls(dist.ProcessGroup):
    """What all calls of a process group share."""

    def __init__(self, comm: Communicator, store: dist.Store, options: Options) -> None:
        super().__init__(comm.rank, comm.world_size)
        self.comm = comm
        self.options = options
        self._store = store
        self._timeout_s: float | None = None
        self._together: list[Work] | None = None
        self._exchanges = Exchanges(comm)
        self._batches = Batches(comm)
        self._compression = None if comm.world_size == 1 else options.compression

    # --- how calls run ----------------------------------------------------------------------------

    def _run(
        self,
        is_async: bool,
        limit_s: float | None,
        outputs: Tensors,
        call: Callable[..., AnyResult],
        *given: object,
        written: Outputs | None = None,
        **named: object,
    ) -> Work:
        """Run a collective, or start it. A second thread's call is queued, as in other backends."""
        fills = None if written is None else written.fill
        if profiler._is_profiler_enabled:
            call = within_ranges(call, self, method_of_caller(), given[0], outputs)
        try:
            if not is_async and self._together is None:
                try:
                    call(*given, timeout_s=limit_s, **named)
                except StateError:
                    if self.comm.is_closed:
                        raise
                else:
                    if fills is not None:
                        fills()
                    return DONE
            started = call(*given, timeout_s=limit_s, async_op=True, **named)
        except GpucollError as error:
            raise as_torchs(error) from None
        return self._noted(Work((started,), outputs, fills))

    def _begin(
        self,
        outputs: Tensors,
        call: Callable[..., Started],
        x: torch.Tensor,
        *given: int,
        written: Outputs | None = None,
    ) -> Work:
        """Start a message."""
        if profiler._is_profiler_enabled:
            given_x = None if outputs else x
            call = within_ranges(call, self, method_of_caller(), given_x, outputs)
        call = partial(call, x, *given, async_op=True, timeout_s=self._timeout_s)
        try:
            if x.device.type in BATCHED:
                works = self._batches.begin(call)
            else:
                works = (call(),)
        except GpucollError as error:
            raise as_torchs(error) from None
        return self._noted(Work(works, outputs, None if written is None else written.fill))

    @contextlib.contextmanager
    def starts_together(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Start the messages of these tensors, if they need it, at the end of the context."""
        try:
            if any(x.device.type in BATCHED for x in tensors):
                with self.comm.group(async_op=True):
                    yield
            else:
                yield
        except GpucollError as error:
            raise as_torchs(error) from None

    def _noted(self, work: Work) -> Work:
        if self._together is not None:
            self._together.append(work)
        return work

    def _plainly(self, call: Callable[[], None]) -> None:
        try:
            call()
        except GpucollError as error:
            raise as_torchs(error) from None

    # --- several calls as one ---------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._together = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._together = self._together or [], None
        return self._as_one(works, [x for work in works for x in work.result()])

    def _each(
        self, call: Callable[..., Work], outputs: Tensors, inputs: Tensors, opts: AnyOptions
    ) -> Work:
        if len(outputs) != len(inputs):
            raise ArgumentError(
                f"the number of outputs must equal the number of inputs; got {len(outputs)} and "
                f"{len(inputs)}"
            )
        works = [call(out, x, opts) for out, x in zip(outputs, inputs, strict=True)]
        return self._as_one(works, outputs)

    def _as_one(self, works: Sequence[Work], outputs: Tensors) -> Work:
        return Work([_Inner(work) for work in works], outputs) if works else Finished(outputs)

    def _blocks(self, call: str, which: str, lists: Lists) -> Tensors:
        """Return the blocks of all ranks. torch gives either the list or a list that contains it.

        Raises
        ------
        ArgumentError
            The number of blocks is not the number of ranks.
        """
        blocks = lists[0] if len(lists) == 1 and isinstance(lists[0], list | tuple) else lists
        if len(blocks) != self.comm.world_size:
            raise ArgumentError(
                f"rank {self.comm.rank} of {self.comm.world_size}: {call} needs a list of "
                f"{self.comm.world_size} {which} tensors, one for each rank; got {len(blocks)}"
            )
        return list(blocks)

    # --- torch's options --------------------------------------------------------------------------

    def _read(
        self, opts: AnyOptions, kind: type[AnyOptions] = c10d.AllreduceOptions
    ) -> tuple[str | ReduceOp, bool, float | None]:
        """Return a reduction's op, whether it is asynchronous, and its deadline."""
        opts = kind() if opts is None else opts
        return operation_of(opts.reduceOp), opts.asyncOp, self._limit(opts.timeout)

    def _timing(
        self, opts: AnyOptions, kind: type[AnyOptions], timeout: datetime.timedelta | None = None
    ) -> tuple[bool, float | None]:
        if not isinstance(opts, kind):
            return True, self._limit(opts if timeout is None else timeout)
        return opts.asyncOp, self._limit(opts.timeout)

    def _rooted(
        self,
        opts: AnyOptions,
        kind: type[AnyOptions],
        root: int | None,
        timeout: datetime.timedelta | None,
    ) -> tuple[int, bool, float | None]:
        """Return a movement's root, whether it is asynchronous, and its deadline."""
        if isinstance(opts, kind):
            return opts.rootRank, opts.asyncOp, self._limit(opts.timeout)
        return opts if root is None else root, True, self._limit(timeout)

    def _limit(self, timeout: datetime.timedelta | None) -> float | None:
        if timeout is None or timeout == _NO_TIMEOUT:
            return self._timeout_s
        limit_s = seconds(timeout)
        return self._timeout_s if limit_s is None else limit_s

    def _check_size(self, call: str, part: torch.Tensor, whole: torch.Tensor) -> None:
        if part.numel() * self.comm.world_size != whole.numel():
            raise ArgumentError(
                f"rank {self.comm.rank} of {self.comm.world_size}: {call} needs a whole of "
                f"{self.comm.world_size} times the part; got {whole.numel()} and {part.numel()} "
                "elements"
            )


class _Inner:
    """A work of torch's that is one part of another work."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self, timeout_s: float | None = None) -> None:
        self._work.wait(None if timeout_s is None else datetime.timedelta(seconds=timeout_s))

    def done(self) -> bool:
        return self._work.is_completed()

    def exception(self) -> BaseException | None:
        return self._work.exception()

    def add_done_callback(self, function: Callable[[object], object]) -> None:
        self._work.add_done_callback(function)


def operation_of(op: AnyOp) -> str | ReduceOp:
    """Return gpucoll's name of a reduce op of torch's."""
    if op is None:
        return "sum"
    name = _NUMBERED.get(hash(op))
    if name is not None:
        return name
    if op == dist.ReduceOp.PREMUL_SUM:
        _, factor = op.__getstate__()
        return gpucoll.ReduceOp.scaled_sum(float(factor))
    raise ArgumentError(f"gpucoll has no equivalent of reduce op {op!r}")
