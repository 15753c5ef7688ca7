"""Collectives on arrays that the compiled entries leave to Python, and plans."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gpucoll.arrays.array_kinds import kind_of_array, note_written, numpy_view
from gpucoll.arrays.library import AnyArray, AnyStream, Template
from gpucoll.arrays.operands import Operands, is_sequence_of_arrays
from gpucoll.backends.protocol import HostBackend, PreparedCall, Request
from gpucoll.calls import counts as exchanged_counts
from gpucoll.calls.block_lists import check_on_host, has_blocks, with_counts
from gpucoll.calls.block_preparation import prepare_blocks
from gpucoll.calls.dispatch import Dispatch
from gpucoll.calls.given import AnyInput, AnyResult, Given, Unchecked
from gpucoll.calls.gpu.runner import GpuRunner
from gpucoll.calls.lists import (
    Packed,
    apart,
    by_dtype,
    gpu_requests,
    list_request,
    number_request,
    prepare_list,
)
from gpucoll.calls.plan import Plan
from gpucoll.calls.preparation import (
    NOT_IN_GROUPS,
    Arguments,
    Prepared,
    group_result,
    list_in_group,
    prepare,
)
from gpucoll.calls.runner import Runner
from gpucoll.calls.shapes import parse_counts
from gpucoll.collectives import NO_ROOT, Collective
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.group.in_one_piece import in_one_piece
from gpucoll.transport.shared.words import Status
from gpucoll.types import ReduceOp
from gpucoll.wording import OUT_BY_NAME, is_array_like, spelled_given

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gpucoll.calls.gpu.call import GpuCall

_LEFT_TO_PYTHON = frozenset(map(int, (Status.OK, Status.NOT_RUN)))


class Collectives:
    """The collectives of one communicator.

    Parameters
    ----------
    runner : Runner
        Runs calls on the host in turn.
    host : HostBackend
        Moves host arrays.
    gpu : GpuRunner
        Makes calls on GPU arrays.
    dispatch : Dispatch
        Decides whether an array goes to the host backend or to the GPUs.
    call_again : callable
        ``(name, *arguments)``: calls the communicator's method with that name.
    """

    def __init__(
        self,
        runner: Runner,
        host: HostBackend,
        gpu: GpuRunner,
        dispatch: Dispatch,
        call_again: Callable[..., AnyResult],
    ) -> None:
        self.runner = runner
        self.host = host
        self.dispatch = dispatch
        self.rank = runner.group.rank
        self.world_size = runner.group.world_size
        self.gpu = gpu
        self.label = 0
        """`Request.label` of the next call, if `gpucoll.integrations.native` makes it."""
        self._last_status = host.last_status
        self._call_again = call_again

    def raise_left(self) -> None:
        """Raise the error of the last compiled entry, unless it only left the call to Python."""
        if (status := self._last_status()) not in _LEFT_TO_PYTHON:
            self.runner.group.raise_for(status)

    def raise_status(self, status: int) -> None:
        """Raise the error for a status of compiled code, unless it only left the call to Python."""
        if status not in _LEFT_TO_PYTHON:
            self.runner.group.raise_for(status)

    def call(
        self,
        collective: Collective,
        x: AnyInput,
        async_op: bool,
        timeout_s: float | None,
        stream: AnyStream,
        **given: Unpack[Given],
    ) -> AnyResult:
        """Check the arguments and run the call in turn; teach the entry if it can serve it."""
        cached_calls = self.gpu.call_cache.get(type(x))
        if cached_calls is not None and stream is None:
            result = self.gpu.repeat(cached_calls, collective, x, given, async_op, timeout_s)
            if result is not None:
                return result
        op, counts = given.get("op"), (given.get("counts"), given.get("receive_counts"))
        if type(op) is str and sys.intern(op) is not op:  # entries compare ops by identity
            given["op"] = sys.intern(op)
            options = {"async_op": async_op, "timeout_s": timeout_s, "stream": stream}
            return self._call_again(collective.spelled, x, **given, **options)
        if (
            isinstance(x, list | tuple)
            and collective.takes_lists
            and (not x or is_sequence_of_arrays(x))
        ):
            return self._run_list(collective, x, given, async_op, timeout_s, stream)
        if has_blocks(collective, x, given.get("out")):
            check_on_host(collective, self.dispatch.enqueues_host)
            given = with_counts(collective, x, given, self.rank, self.world_size)
            counts = given.get("counts"), given.get("receive_counts")
        elif counts[0] is not None and not async_op and stream is None:
            served = self._run_as_numpy(collective, x, given, timeout_s)
            if served is not None:
                return served[0]
        if exchanged_counts.are_asked_for(collective, *counts):
            return self._run_with_counts(collective, x, given, async_op, timeout_s, stream)
        return self._run_now(collective, x, given, async_op, timeout_s, stream)

    def _run_as_numpy(
        self, collective: Collective, x: AnyInput, given: Given, timeout_s: float | None
    ) -> tuple[AnyResult] | None:
        """Serve a tensor with counts by the entry for NumPy arrays; None if it does not serve it.

        The entry reads counts and blocks for NumPy's arrays alone, and a tensor on the host is one.
        """
        view, out, counts = numpy_view(x), given.get("out"), given.get("counts")
        root = given.get("root")
        if view is None or type(counts) is not list or self.runner.grouped is not None:
            return None
        gets = root is None or collective.gets(self.rank, root)
        if gets and out is None:
            came = given.get("receive_counts") or counts
            try:
                rows = sum(came) if collective.gathers else counts[self.rank]
                out = x.new_empty((rows, *x.shape[1:]))
            except (IndexError, RuntimeError, TypeError):
                return None
        into = numpy_view(out) if gets else view
        if into is None:
            return None
        what = given.get("op"), root, timeout_s, counts, given.get("receive_counts")
        entry = self.host.entry(collective, of_blocks=True)
        if entry(view, into, *what) is None:
            self.raise_left()
            return None
        if not gets:
            return (None,)
        note_written(out)
        return (out,)

    def _run_now(
        self,
        collective: Collective,
        x: AnyInput,
        given: Given,
        async_op: bool,
        timeout_s: float | None,
        stream: AnyStream,
    ) -> AnyResult:
        arguments = self.parse(given)
        prepared = self._prepare(collective, x, arguments)
        if self.dispatch.is_enqueued(prepared.template):
            gpu_call = _gpu_call(collective, prepared, stream, timeout_s)
            result = self.gpu.call(gpu_call, async_op, group_result(prepared))
            self.gpu.learn(collective, x, given, prepared)
            return result
        call = self._prepared_by_host(prepared.request)
        shown = x if x is not None else arguments.out
        if arguments.counts is not None or has_blocks(collective, x, arguments.out):
            self._learn_blocks(collective, shown, prepared.template, given)
        else:
            self._learn(collective, shown, prepared.template, given)
            if async_op and (shown := numpy_view(shown)) is not None:
                self._learn(collective, shown, prepared.template, given)  # see `Starting`
        return self.runner.run_call(
            collective.spelled,
            call,
            prepared.finish,
            async_op=async_op,
            timeout_s=timeout_s,
            lasting=group_result(prepared),
        )

    def _prepared_by_host(self, request: Request) -> PreparedCall:
        return self.host.prepare(request._replace(label=self.label) if self.label else request)

    def _run_list(
        self,
        collective: Collective,
        xs: Sequence[AnyArray],
        given: Given,
        async_op: bool,
        timeout_s: float | None,
        stream: AnyStream,
    ) -> AnyResult:
        """Run a list of arrays as one call for each dtype."""
        arguments = self.parse(given)
        gets = collective.gets(self.rank, arguments.root)
        made = prepare_list(xs, arguments.out if gets else None)

        def finish() -> AnyResult:
            results = [item.finish() for item in made] if gets else None
            return tuple(results) if results is not None and isinstance(xs, tuple) else results

        lasting = list_in_group(made, xs) if gets else None
        if made and self.dispatch.is_enqueued(made[0].template):
            from gpucoll.calls.gpu.call import GpuCall

            call = GpuCall(
                collective.spelled,
                made[0].template,
                finish,
                self._list_requests(collective, made, arguments, gets, stream),
                is_own=arguments.out is not None and lasting is not NOT_IN_GROUPS,
                stream=stream,
                timeout_s=timeout_s,
            )
            return self.gpu.call(call, async_op, lasting)
        numbers, fused = apart(collective, arguments.op, made)
        tasks = [self._number_task(collective, item, arguments, gets) for item in numbers]
        tasks += [self._list_task(collective, arrays, arguments) for arrays in by_dtype(fused)]
        if (whole := collective.of_list) is not None and len(tasks) == 1:
            self._learn(whole, xs[0], made[0].template, given)

        def task(timeout_s: float | None) -> None:
            for part in tasks[:1]:
                part(timeout_s)
            if len(tasks) > 1:
                with in_one_piece(self.runner.group):
                    for part in tasks[1:]:
                        part(timeout_s)

        return self.runner.run(
            collective.spelled,
            task,
            finish,
            async_op=async_op,
            timeout_s=timeout_s,
            lasting=lasting,
        )

    def _list_requests(
        self,
        collective: Collective,
        made: list[Operands],
        arguments: Arguments,
        gets: bool,
        stream: AnyStream,
    ) -> list[Request]:
        """Return the requests for a list that is enqueued."""
        numbers, fused = apart(collective, arguments.op, made)
        alone = [
            number_request(collective, item, arguments, self.world_size, gets) for item in numbers
        ]
        return [*alone, *gpu_requests(collective, fused, arguments, stream)]

    def _prepare(self, collective: Collective, x: AnyInput, arguments: Arguments) -> Prepared:
        """Check this rank's arguments and return the request."""
        if not has_blocks(collective, x, arguments.out):
            return prepare(collective, x, arguments, self.rank, self.world_size)
        prepared = prepare_blocks(collective, x, arguments, self.rank, self.world_size)
        check_on_host(collective, self.dispatch.is_enqueued(prepared.template))
        return prepared

    def _learn(self, collective: Collective, x: AnyInput, template: Template, given: Given) -> None:
        """Have the compiled entry serve the next call of this kind, if it reads arrays like x."""
        kind = kind_of_array(x, template)
        if kind is not None:
            self.host.learn(collective, kind, given.get("op"), given.get("root"))

    def _learn_blocks(
        self, collective: Collective, x: AnyInput, template: Template, given: Given
    ) -> None:
        """Have the compiled entry serve the next call with counts or blocks, on NumPy arrays."""
        shown = x[0] if isinstance(x, list | tuple) else x
        view = numpy_view(shown)
        kind = kind_of_array(shown if view is None else view, template)
        if kind is not None and not kind.tensor_table:
            op, root = given.get("op"), given.get("root")
            self.host.learn(collective, kind, op, root, of_blocks=True)

    def _number_task(
        self, collective: Collective, item: Operands, arguments: Arguments, gets: bool
    ) -> Callable[[float | None], None]:
        """Return a function that runs one number of a list by itself."""
        request = number_request(collective, item, arguments, self.world_size, gets)
        run: Callable[[float | None], None] = self._prepared_by_host(request).run
        return run

    def _list_task(
        self, collective: Collective, arrays: list[Operands], arguments: Arguments
    ) -> Callable[[float | None], None]:
        """Return a function that runs the arrays of one dtype."""
        if collective == Collective.ALL_REDUCE:
            run: Callable[[float | None], None] = self._prepared_by_host(
                list_request(arrays, arguments)
            ).run
            return run
        packed = Packed(arrays)
        gets = collective.gets(self.rank, arguments.root)
        destination = packed.buffer if gets else None
        request = Request(collective, packed.buffer, destination, arguments.op, arguments.root)
        call = self._prepared_by_host(request)

        def task(timeout_s: float | None) -> None:
            packed.pack()
            call.run(timeout_s)
            if gets:
                packed.unpack()

        return task

    def parse(self, given: Given) -> Arguments:
        """Return the arguments of a call, checked."""
        op = ReduceOp.parse(given["op"]) if "op" in given else None
        if "root" in given:
            self.check_root(given["root"])
        sent, received = given.get("counts"), given.get("receive_counts")
        sent_name = "send_counts" if "receive_counts" in given else "counts"
        return Arguments(
            op=op,
            root=int(given.get("root", NO_ROOT)),
            out=given.get("out"),
            counts=None if sent is None else parse_counts(sent, self.world_size, sent_name),
            receive_counts=(
                None if received is None else parse_counts(received, self.world_size, "recv_counts")
            ),
        )

    def plan(self, collective: Collective, x: AnyInput, **given: Unpack[Given]) -> Plan[AnyResult]:
        """Prepare a call that runs repeatedly on the same memory."""
        if has_blocks(collective, x, given.get("out")):
            given = with_counts(collective, x, given, self.rank, self.world_size)
            if given.get("counts") is not None and given.get("receive_counts", ()) is None:
                raise ArgumentError(
                    "a plan of a list needs out= or recv_counts=: it does not ask the other ranks"
                )
        arguments = self.parse(given)
        prepared = self._prepare(collective, x, arguments)
        gets_nothing = prepared.request.destination is None
        if prepared.is_packed:
            raise ArgumentError("a plan needs x to be a C-contiguous array: it is not copied")
        if prepared.lasting is None and not gets_nothing:
            name = "x" if arguments.out is None else "out"
            raise ArgumentError(
                f"a plan needs {name} to be a writable C-contiguous array, which excludes numbers "
                "and JAX arrays: every call writes the same memory"
            )
        if self.dispatch.is_enqueued(prepared.template):
            run = self.gpu.prepare_plan(_gpu_call(collective, prepared))
            return Plan(run, self.raise_status, None, prepared.lasting)
        call = self._prepared_by_host(prepared.request)

        def run_slowly() -> None:
            self.runner.run(collective.spelled, call.run, lasting=prepared.lasting)

        return Plan(call.run_once, self.raise_status, run_slowly, prepared.lasting)

    def _run_with_counts(
        self,
        collective: Collective,
        x: AnyInput,
        given: Given,
        async_op: bool,
        timeout_s: float | None,
        stream: AnyStream,
    ) -> AnyResult:
        """Exchange the counts in the call's turn, then run the call with them."""
        rank, world_size, channel = self.rank, self.world_size, self.runner.channel
        arguments = self.parse({**given, "counts": None, "receive_counts": None})
        template = exchanged_counts.check_alone(collective, x, given, arguments, world_size)
        mine = exchanged_counts.own(collective, x, given, rank, world_size)
        if template is not None and self.dispatch.is_enqueued(template):
            known: Given = {}

            def ask(timeout_s: float | None) -> None:
                known.update(exchanged_counts.exchange(channel, collective, mine, rank, timeout_s))

            self.runner.run(collective.spelled, ask, timeout_s=timeout_s)
            with in_one_piece(self.runner.group):
                given = {**given, **known}
                return self._run_now(collective, x, given, async_op, timeout_s, stream)
        if not async_op and self.runner.grouped is None:
            known = {}
            self.runner.run(
                collective.spelled,
                lambda limit_s: known.update(
                    exchanged_counts.exchange(channel, collective, mine, rank, limit_s)
                ),
                timeout_s=timeout_s,
            )
            named = exchanged_counts.as_given(collective, {**given, **known})

            def fail() -> None:
                self.runner.run(
                    collective.spelled, partial(exchanged_counts.fail, channel), timeout_s=timeout_s
                )

            with exchanged_counts.known_to_all(self.runner.group, fail):
                return self._call_again(collective.spelled, x, **named, timeout_s=timeout_s)
        finishing: list[Callable[[], Any]] = []

        def task(timeout_s: float | None) -> None:
            known = exchanged_counts.exchange(channel, collective, mine, rank, timeout_s)
            fail = partial(exchanged_counts.fail, channel, timeout_s)
            with exchanged_counts.known_to_all(self.runner.group, fail):
                prepared = self._prepare(collective, x, self.parse({**given, **known}))
                self._prepared_by_host(prepared.request).run(timeout_s)
            finishing.append(prepared.finish)

        return self.runner.run(
            collective.spelled,
            task,
            lambda: finishing.pop()(),
            async_op=async_op,
            timeout_s=timeout_s,
        )

    def check_root(self, root: Unchecked) -> None:
        """Raise unless `root` is a rank."""
        if isinstance(root, bool) or not isinstance(root, int | np.integer):
            hint = OUT_BY_NAME if is_array_like(root) else ""
            raise ArgumentTypeError(f"root must be an int; got {spelled_given(root)}{hint}")
        if not 0 <= root < self.world_size:
            raise ArgumentError(f"root must be in 0..{self.world_size - 1}; got {root}")


def _gpu_call(
    collective: Collective,
    prepared: Prepared,
    stream: AnyStream = None,
    timeout_s: float | None = None,
) -> GpuCall:
    """Return a prepared collective as a call on GPU arrays."""
    from gpucoll.calls.gpu.call import GpuCall

    return GpuCall(
        collective.spelled,
        prepared.template,
        prepared.finish,
        [prepared.request],
        is_own=prepared.is_own,
        stream=stream,
        timeout_s=timeout_s,
    )
