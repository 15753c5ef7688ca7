"""Groups of calls: collected first, then run together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from gpucoll.calls.collected import Collected
from gpucoll.calls.gpu.runner import GpuRunner
from gpucoll.calls.lists import shared_by
from gpucoll.calls.messages import Grouped, MessageQueue
from gpucoll.calls.runner import GroupedTask, Runner
from gpucoll.errors import ArgumentError, MismatchError, StateError
from gpucoll.group.in_one_piece import in_one_piece
from gpucoll.transport.shared.words import Kind

if TYPE_CHECKING:
    from gpucoll.calls.gpu.call import GpuCall


@contextmanager
def collected(
    runner: Runner, message_queue: MessageQueue, gpu: GpuRunner, timeout_s: float | None
) -> Iterator[None]:
    """Collect the calls made in the context, and run them at its end: `Communicator.group`."""
    _check_none_is_open(runner, gpu)
    calls: Collected[GroupedTask] = Collected()
    messages: Collected[Grouped] = Collected()
    gpu_calls: Collected[GpuCall] = Collected()
    runner.grouped, message_queue.grouped, gpu.grouped = calls, messages, gpu_calls
    message_queue.hold(True)
    try:
        with runner.queue.held():
            yield
    finally:
        runner.grouped = message_queue.grouped = gpu.grouped = None
        message_queue.hold(False)

    _check_independent(gpu_calls)
    failures: list[Exception] = []
    with in_one_piece(runner.group) if messages or calls else nullcontext():
        if messages:
            try:
                message_queue.run_group(messages, timeout_s)
            except Exception as error:  # collectives are independent of messages
                failures.append(error)
        if calls:
            runner.run("group", lambda _: failures.extend(_run_all(calls)), timeout_s=timeout_s)
        gpu.run_group(gpu_calls, timeout_s)
    if failures:
        raise failures[0]


@contextmanager
def started_together(runner: Runner, gpu: GpuRunner, timeout_s: float | None) -> Iterator[None]:
    """Start the calls on GPU arrays at the end of the context, all together.

    Calls on host arrays are made at once, as outside: started messages never wait for each other.
    """
    _check_none_is_open(runner, gpu)
    calls: Collected[GpuCall] = Collected(is_async=True)
    gpu.grouped = calls
    try:
        yield
    finally:
        gpu.grouped = None
    _check_independent(calls)
    gpu.run_group(calls, timeout_s)


def _check_none_is_open(runner: Runner, gpu: GpuRunner) -> None:
    if runner.grouped is not None or gpu.grouped is not None:
        raise StateError("a group is open already: groups do not nest")


def _run_all(calls: Sequence[GroupedTask]) -> Iterator[MismatchError]:
    """Run collectives in order, even after one that did not match; yield the MismatchErrors.

    Ranks that make the same calls outside of a group see each of them as a separate call.
    """
    for call in calls:
        try:
            call.run(call.timeout_s)
            if call.finish is not None:
                call.finish()
        except MismatchError as error:
            yield error


def _check_independent(calls: Sequence[GpuCall]) -> None:
    """Raise ArgumentError if a call on GPU arrays uses memory that another one writes."""
    users = []
    for call in calls:
        pairs = [
            pair
            for request in call.requests
            for pair in request.parts or ((request.source, request.destination),)
        ]
        reads = [source for source, _ in pairs if source is not None]
        writes = [destination for _, destination in pairs if destination is not None]
        for message in call.messages:
            if message.buffer is not None:
                (reads if message.kind == Kind.SEND else writes).append(message.buffer)
        users.append((reads, writes))
    if shared := shared_by(users):
        one, other = sorted(shared)
        raise ArgumentError(
            f"call {one} ({calls[one].name}) and call {other} ({calls[other].name}) on GPU arrays "
            "in group() (with mixed=True: on any) share memory, and one writes it; they are made "
            "at once, in no order: make them one after the other, outside of the group"
        )
