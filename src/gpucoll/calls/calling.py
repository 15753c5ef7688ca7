"""How a call on arrays runs: the compiled entry, the long way round, plans."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpucoll.arrays.library import Template
from gpucoll.arrays.operands import Operands, ensure_served, is_sequence_of_arrays, template_of
from gpucoll.backends.protocol import Request
from gpucoll.calls.gpu.call import GpuCall
from gpucoll.calls.gpu.calls import GpuCalls
from gpucoll.calls.lists import FUSED, Packed, by_dtype, gpu_requests, list_request, prepare_list
from gpucoll.calls.plan import Plan
from gpucoll.calls.preparation import (
    NOT_IN_GROUPS,
    Arguments,
    Prepared,
    group_result,
    list_in_group,
    prepare,
)
from gpucoll.calls.shapes import check_rows, parse_counts
from gpucoll.errors import ArgumentError, ArgumentTypeError, BackendUnavailableError
from gpucoll.group.host.channel import ControlChannel
from gpucoll.group.host.group import HostGroup
from gpucoll.transport.shared.words import Context, Status
from gpucoll.types import Collective, ReduceOp

_STATUS = int(Context.STATUS)
_LEFT_TO_PYTHON = frozenset(map(int, (Status.OK, Status.NOT_RUN, Status.ASIDE, Status.MISFIT)))


class Calling:
    """The part of `Communicator` that its methods on arrays stand on."""

    rank: int
    world_size: int
    _group: HostGroup
    _backend: Any
    _gpu: GpuCalls
    _host_refusal: str
    """Why host arrays are not moved; empty where they are."""
    _channel: ControlChannel
    _run: Callable[..., Any]

    def _bind_entries(self) -> None:
        """Look the compiled entries up, once."""
        self._words: Any = self._group.context.data  # an item of it is an int, in half the time
        entry: Callable[[Collective], Callable[..., Any]] = self._backend.entry
        self._quick_all_reduce = entry(Collective.ALL_REDUCE)
        self._quick_list: Callable[[Any, Any, Any], Any] = entry(Collective.ALL_REDUCE_LIST)
        self._quick_reduce = entry(Collective.REDUCE)
        self._quick_reduce_scatter = entry(Collective.REDUCE_SCATTER)
        self._quick_scan = entry(Collective.SCAN)
        self._quick_exclusive_scan = entry(Collective.EXCLUSIVE_SCAN)
        self._quick_broadcast = entry(Collective.BROADCAST)
        self._quick_all_gather = entry(Collective.ALL_GATHER)
        self._quick_gather = entry(Collective.GATHER)
        self._quick_scatter = entry(Collective.SCATTER)
        self._quick_all_to_all = entry(Collective.ALL_TO_ALL)
        self._quick_send = self._backend.messages.send
        self._quick_recv = self._quick_send_recv = self._backend.messages.receive
        if self._host_refusal:
            self._unbind_entries()

    def _unbind_entries(self) -> None:
        """Leave every call to Python, which refuses host arrays."""
        for name in [name for name in vars(self) if name.startswith("_quick_")]:
            setattr(self, name, _leave_to_python)

    def _check_host(self, what: str = "x") -> None:
        """Raise BackendUnavailableError where this communicator moves no host arrays."""
        if self._host_refusal:
            raise BackendUnavailableError(f"{what} lies in host memory: {self._host_refusal}")

    def _whole_like(self, x: Any) -> Any:
        """Return a new array for everybody's x side by side; None for what is no NumPy array."""
        if type(x) is not np.ndarray or x.ndim == 0:
            return None
        shape = x.shape
        return np.empty((shape[0] * self.world_size, *shape[1:]), x.dtype)

    def _block_like(self, x: Any) -> Any:
        """Return a new array for one rank's block of x; None for what is no NumPy array."""
        if type(x) is not np.ndarray or x.ndim == 0:
            return None
        shape = x.shape
        return np.empty((shape[0] // self.world_size, *shape[1:]), x.dtype)

    def _list_like(self, xs: list[Any]) -> Any:
        """Return new arrays for the results of a list; None where it holds anything else."""
        if not all(type(x) is np.ndarray for x in xs):
            return None
        return [np.empty_like(x) for x in xs]

    def _is_template(self, x: Any, out: Any) -> bool:
        """Return whether x says, off the root of a scatter, what `out` also says."""
        if x is None or type(x) is not np.ndarray or type(out) is not np.ndarray:
            return x is None
        return (
            x.dtype is out.dtype
            and x.ndim > 0
            and x.shape[0] % self.world_size == 0
            and x.size == out.size * self.world_size
        )

    def _raise_quick(self) -> None:
        """Raise what the compiled entry met, unless it only left the call to Python."""
        status = self._words[_STATUS]
        if status not in _LEFT_TO_PYTHON:
            self._raise_status(status)

    def _raise_status(self, status: int) -> None:
        """Raise for a status of compiled code, unless it only leaves the call to Python."""
        if status not in _LEFT_TO_PYTHON:
            self._group.raise_for(status)

    # --- the long way -----------------------------------------------------------------------------

    def _call(
        self,
        collective: Collective,
        x: Any,
        async_op: bool,
        timeout_s: float | None,
        stream: Any,
        **given: Any,
    ) -> Any:
        """Check everything, then run in turn; teach the compiled entry where it could serve."""
        cached_calls = self._gpu.call_cache.get(type(x))
        if cached_calls is not None and stream is None:
            result = self._gpu.repeat(cached_calls, collective, x, given, async_op, timeout_s)
            if result is not None:
                return result
        op, counts = given.get("op"), (given.get("counts"), given.get("receive_counts"))
        if type(op) is str and sys.intern(op) is not op:  # known by identity, see EntryTable
            given["op"] = sys.intern(op)
            method = getattr(self, collective.spelled)
            return method(x, **given, async_op=async_op, timeout_s=timeout_s, stream=stream)
        if (
            isinstance(x, list | tuple)
            and collective in FUSED
            and (not x or is_sequence_of_arrays(x))
        ):
            return self._run_list(collective, x, given, async_op, timeout_s, stream)
        run = self._run_later if self._asks_for_counts(collective, *counts) else self._run_now
        return run(collective, x, given, async_op, timeout_s, stream)

    def _run_now(
        self,
        collective: Collective,
        x: Any,
        given: dict[str, Any],
        async_op: bool,
        timeout_s: float | None,
        stream: Any,
    ) -> Any:
        arguments = self._parse(given)
        prepared = prepare(collective, x, arguments, self.rank, self.world_size)
        if prepared.template.device != "cpu":
            call = _gpu_call(collective, prepared, stream, timeout_s)
            result = self._gpu.call(call, async_op, group_result(prepared))
            self._gpu.learn(collective, x, given, prepared)
            return result
        self._check_host()
        call = self._backend.prepare(prepared.request)
        plain = x if x is not None else arguments.out
        if type(plain) is np.ndarray and arguments.counts is None:
            self._backend.learn(collective, plain.dtype, given.get("op"), given.get("root"))
        return self._run(
            collective.spelled,
            call.run,
            prepared.finish,
            async_op=async_op,
            timeout_s=timeout_s,
            lasting=group_result(prepared),
        )

    def _run_list(
        self,
        collective: Collective,
        xs: Sequence[Any],
        given: dict[str, Any],
        async_op: bool,
        timeout_s: float | None,
        stream: Any,
    ) -> Any:
        """Run a list of arrays as one call for each dtype in it."""
        arguments = self._parse(given)
        gets = collective != Collective.REDUCE or arguments.root == self.rank
        made = prepare_list(xs, arguments.out if gets else None)

        def finish() -> Any:
            results = [item.finish() for item in made] if gets else None
            return tuple(results) if results is not None and isinstance(xs, tuple) else results

        lasting = list_in_group(made, xs) if gets else None
        if made and made[0].template.device != "cpu":
            call = GpuCall(
                collective.spelled,
                made[0].template,
                finish,
                gpu_requests(collective, made, arguments, stream),
                is_own=arguments.out is not None and lasting is not NOT_IN_GROUPS,
                stream=stream,
                timeout_s=timeout_s,
            )
            return self._gpu.call(call, async_op, lasting)
        self._check_host()
        tasks = [self._list_task(collective, arrays, arguments) for arrays in by_dtype(made)]
        if collective == Collective.ALL_REDUCE and len(tasks) == 1 and type(xs[0]) is np.ndarray:
            self._backend.learn(Collective.ALL_REDUCE_LIST, xs[0].dtype, given.get("op"), None)

        def task(timeout_s: float | None) -> None:
            for part in tasks:
                part(timeout_s)

        return self._run(
            collective.spelled,
            task,
            finish,
            async_op=async_op,
            timeout_s=timeout_s,
            lasting=lasting,
        )

    def _list_task(
        self, collective: Collective, arrays: list[Operands], arguments: Arguments
    ) -> Callable[[float | None], None]:
        """Return what runs the arrays of one dtype."""
        if collective == Collective.ALL_REDUCE:
            run: Callable[[float | None], None] = self._backend.prepare(
                list_request(arrays, arguments)
            ).run
            return run
        packed = Packed(arrays)
        gets = collective != Collective.REDUCE or arguments.root == self.rank
        destination = packed.buffer if gets else None
        request = Request(collective, packed.buffer, destination, arguments.op, arguments.root)
        call = self._backend.prepare(request)

        def task(timeout_s: float | None) -> None:
            packed.pack()
            call.run(timeout_s)
            if gets:
                packed.unpack()

        return task

    def _parse(self, given: dict[str, Any]) -> Arguments:
        """Return what the user gave, checked."""
        found: dict[str, Any] = {"out": given.get("out")}
        if "op" in given:
            found["op"] = ReduceOp.parse(given["op"])
        if "root" in given:
            self._check_root(given["root"])
            found["root"] = int(given["root"])
        for name, spelled in (("counts", "counts"), ("receive_counts", "recv_counts")):
            if given.get(name) is not None:
                is_sent = name == "counts" and "receive_counts" in given
                label = "send_counts" if is_sent else spelled
                found[name] = parse_counts(given[name], self.world_size, label)
        return Arguments(**found)

    def _plan(self, collective: Collective, x: Any, **given: Any) -> Plan[Any]:
        """Prepare a call that is made again and again on the same memory."""
        arguments = self._parse(given)
        prepared = prepare(collective, x, arguments, self.rank, self.world_size)
        gets_nothing = prepared.request.destination is None
        if prepared.is_packed:
            raise ArgumentError("a plan needs x to be a C-contiguous array: it is not copied")
        if prepared.lasting is None and not gets_nothing:
            name = "x" if arguments.out is None else "out"
            raise ArgumentError(
                f"a plan needs {name} to be a C-contiguous array that can be written, as numbers "
                "and JAX arrays cannot be: it gives the same memory every time"
            )
        if prepared.template.device != "cpu":
            run = self._gpu.prepare_plan(_gpu_call(collective, prepared))
            return Plan(run, self._raise_status, _nothing, prepared.lasting)
        self._check_host()
        call = self._backend.prepare(prepared.request)

        def run_slowly() -> None:
            self._run(collective.spelled, call.run, lambda: None, lasting=prepared.lasting)

        return Plan(call.run_once, self._raise_status, run_slowly, prepared.lasting)

    # --- counts that the ranks have to ask each other for -----------------------------------------

    def _asks_for_counts(self, collective: Collective, counts: Any, receive_counts: Any) -> bool:
        if collective != Collective.ALL_TO_ALL:
            return isinstance(counts, str) and counts == "auto"
        if isinstance(counts, str) or (counts is None and receive_counts is not None):
            raise ArgumentTypeError(
                "all_to_all: send_counts says how many rows go to each rank; only recv_counts can "
                'be "auto"'
            )
        return counts is not None and (
            receive_counts is None or (isinstance(receive_counts, str) and receive_counts == "auto")
        )

    def _run_later(
        self,
        collective: Collective,
        x: Any,
        given: dict[str, Any],
        async_op: bool,
        timeout_s: float | None,
        stream: Any,
    ) -> Any:
        """Exchange the counts in the call's turn, and prepare it with them."""
        template = self._check_alone(collective, x, given)
        mine = self._own_counts(collective, x, given)
        if template is not None and template.device != "cpu":
            known: dict[str, Any] = {}

            def exchange(timeout_s: float | None) -> None:
                known.update(self._exchange_counts(collective, mine, timeout_s))

            self._run(collective.spelled, exchange, _nothing, timeout_s=timeout_s)
            return self._run_now(collective, x, {**given, **known}, async_op, timeout_s, stream)
        self._check_host()
        finishing: list[Callable[[], Any]] = []

        def task(timeout_s: float | None) -> None:
            known = self._exchange_counts(collective, mine, timeout_s)
            arguments = self._parse({**given, **known})
            prepared = prepare(collective, x, arguments, self.rank, self.world_size)
            self._backend.prepare(prepared.request).run(timeout_s)
            finishing.append(prepared.finish)

        return self._run(
            collective.spelled,
            task,
            lambda: finishing.pop()(),
            async_op=async_op,
            timeout_s=timeout_s,
        )

    def _exchange_counts(
        self, collective: Collective, mine: list[int], timeout_s: float | None
    ) -> dict[str, list[int]]:
        """Ask all ranks for their rows; return the counts that they make, by name."""
        data = np.array(mine, np.int64).tobytes()
        everyone = self._channel.all_gather_bytes(data, Collective.COUNTS, timeout_s=timeout_s)
        rows = [np.frombuffer(part, np.int64).tolist() for part in everyone]
        if collective == Collective.ALL_TO_ALL:
            return {"counts": mine, "receive_counts": [row[self.rank] for row in rows]}
        return {"counts": [row[0] for row in rows]}

    def _check_alone(
        self, collective: Collective, x: Any, given: dict[str, Any]
    ) -> Template | None:
        """Check what needs no counts, before anything is sent; return what the arrays are."""
        asked = {"counts": None, "receive_counts": None}
        arguments = self._parse({**given, **asked})
        templates = [template_of(x)] if x is not None else []
        if arguments.out is not None:
            templates.append(template_of(arguments.out, "out"))
        for template in templates:
            ensure_served(template)
            if arguments.op is not None:
                arguments.op.check_dtype(template.dtype)
        if len({template.dtype for template in templates}) > 1:
            raise ArgumentTypeError(
                f"out has dtype {templates[1].dtype}, but x has {templates[0].dtype}"
            )
        if collective == Collective.ALL_TO_ALL:
            counts = parse_counts(given["counts"], self.world_size, "send_counts")
            check_rows(collective, templates[0].shape, sum(counts), "send_counts add up to")
        return templates[0] if templates else None

    def _own_counts(self, collective: Collective, x: Any, given: dict[str, Any]) -> list[int]:
        """Return what this rank tells the others: its own rows, or those to each of them."""
        if collective == Collective.ALL_TO_ALL:
            return list(parse_counts(given["counts"], self.world_size, "send_counts"))
        takes_out = collective in (Collective.SCATTER, Collective.REDUCE_SCATTER)
        array, name = (given["out"], "out") if takes_out else (x, "x")
        shape = getattr(array, "shape", ())
        if not shape:
            raise ArgumentError(
                f'{collective.spelled}: counts="auto" takes the rows from {name}, which must be an '
                "array with rows"
            )
        return [int(shape[0])]

    def _check_root(self, root: Any) -> None:
        if isinstance(root, bool) or not isinstance(root, int | np.integer):
            raise ArgumentTypeError(f"root must be an int; got {root!r}")
        if not 0 <= root < self.world_size:
            raise ArgumentError(f"root must be in 0..{self.world_size - 1}; got {root}")


def _gpu_call(
    collective: Collective, prepared: Prepared, stream: Any = None, timeout_s: float | None = None
) -> GpuCall:
    """Return a prepared collective as a call on GPU arrays."""
    return GpuCall(
        collective.spelled,
        prepared.template,
        prepared.finish,
        [prepared.request],
        is_own=prepared.is_own,
        stream=stream,
        timeout_s=timeout_s,
    )


def _leave_to_python(*_: Any) -> None:
    """Stand for a compiled entry that serves nothing."""


def _nothing() -> None:
    """Return nothing."""
