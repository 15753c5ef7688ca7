"""Calls from compiled code of others, in threads that need not be Python's.

XLA's handlers, TensorFlow's kernels and functions that jaxlib takes for MPI's call `run_site` or
`run_list_site` by their addresses, which a `Site` has. A site is one kind of call on one
communicator, which belongs to its `Door` alone: a mutex, not the interpreter, keeps calls apart.
Whatever these functions cannot do themselves (a first call, one that failed, another backend) they
give to `Door.python`, a function that takes the interpreter.
"""

from __future__ import annotations

from gpucoll.blocks import Block, Field, Words, words
from gpucoll.collectives import Flow
from gpucoll.entries.collective_entry import fill_call
from gpucoll.entries.collectives import (
    EntryTable,
    count_of,
    find_call,
    is_idle,
    mix,
    run_without_python,
)
from gpucoll.entries.lists import MOST_ARRAYS, add_row, describe, sign_array
from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.kernels.cpu.memory import call_words, compare_exchange64, exchange64
from gpucoll.transport.shared.flags import FUTEX_WAIT, FUTEX_WAKE, SYS_FUTEX, give_gil, take_gil
from gpucoll.transport.shared.libc import sched_yield, syscall
from gpucoll.transport.shared.words import Call, Status

__all__ = ["AGAIN", "DONE", "Door", "NativeArray", "Site", "run_list_site", "run_site"]

AGAIN, DONE = -1, -2
"""What `Door.python` returns to have the call made again, and after a call that it has made.

Not 0 for the latter: ctypes returns that for a function that an interrupt ends at its edges.
"""

_FREE, _TAKEN, _AWAITED = 0, 1, 2
_YIELDS = 100

_raise_in_thread = types.ExternalFunction(
    "PyThreadState_SetAsyncExc", types.int32(types.int64, types.int64)
)


class Door(Block):
    """A communicator that compiled code of others calls, and nobody else."""

    mutex: int
    interrupt: int  # a class of exceptions for the main thread, once a call has ended; 0: none
    main_thread: int
    unknown: int  # address of the text for a call of which Python says nothing
    python: int  # (site, source, destination, n_dimensions, dimensions, status, tries, raised)


class Site(Block):
    """One kind of call: what is the same in all calls of an operator of a framework."""

    run: int  # address of `run_site`
    run_list: int  # address of `run_list_site`
    door: Field[Door]
    table: Field[EntryTable]  # 0: Python makes every call
    dtype: int  # identities, as the table has them
    operation: int
    root: int
    label: int  # part of the signature: which operator of the program this is
    block: Field[Words] = words(1)  # the shape of a scatter's block


class NativeArray(Block):
    """An input and an output of one shape."""

    source: int
    destination: int
    n_dimensions: int
    dimensions: Field[Words]


@inline
def _take(door: Door) -> None:
    """Wait for the mutex: as long as the call that has it, which has a deadline."""
    mutex = door.at.mutex
    for _ in range(_YIELDS):
        if compare_exchange64(mutex, _FREE, _TAKEN) == _FREE:
            return
        sched_yield()
    while exchange64(mutex, _AWAITED) != _FREE:
        syscall(SYS_FUTEX, mutex, FUTEX_WAIT, _AWAITED, 0, 0, 0)


@inline
def _give_back(door: Door) -> None:
    if exchange64(door.at.mutex, _FREE) == _AWAITED:
        syscall(SYS_FUTEX, door.at.mutex, FUTEX_WAKE, 1, 0, 0, 0)


@inline
def _raised(site: Site) -> int:
    """Return where a call keeps what a signal handler has raised."""
    table = site.table
    return 0 if not table else table.context.at.raised


@inline
def _end(door: Door) -> None:
    """Give the mutex back, and have the main thread raise what its signal handler has raised.

    Not in Python: the exception would be raised in the very function that passes it on.
    """
    interrupt = door.interrupt
    door.interrupt = 0
    _give_back(door)
    if interrupt != 0:
        gil = take_gil()
        _raise_in_thread(door.main_thread, interrupt)
        give_gil(gil)


@inline
def _text(door: Door, answer: int) -> int:
    """Return what an answer of Python's is to the caller of compiled code, or AGAIN."""
    if answer == DONE:
        return 0
    return door.unknown if answer == 0 else answer


@inline
def _call_at(site: Site) -> Call:
    """Return the call block of a site, if the communicator can be called now; otherwise 0."""
    table = site.table
    if not table or not is_idle(table.context):
        return Call(0)
    return find_call(table, site.dtype, site.operation, site.root)


@inline
def _prepare(
    site: Site, source: int, destination: int, n_dimensions: int, dimensions: Words
) -> Call:
    """Find and fill in the call block; return it, or 0 if Python must check."""
    call = _call_at(site)
    if not call:
        return call
    if call.root >= 0 and call.root != call.context.rank:
        if call.flow == Flow.TO_ROOT:
            destination = source
        elif call.spreads:
            if n_dimensions == 0 or dimensions[0] % call.context.world_size != 0:
                return Call(0)
            site.block[0] = count_of(n_dimensions, dimensions) // call.context.world_size
            n_dimensions, dimensions, source = 1, site.block, destination
    out_count = -1
    if source != destination or call.source_parts != call.destination_parts:
        count = count_of(n_dimensions, dimensions)
        out_count = count * call.destination_parts // call.source_parts
    return fill_call(call, n_dimensions, dimensions, source, destination, out_count)


@inline
def _run(site: Site, call: Call) -> int:
    """Run a call that is filled in, if it is one; return its status."""
    if not call:
        return Status.NOT_RUN
    if site.label != 0:
        call.digest = mix(call.digest, site.label)
    return run_without_python(call.context, call)


@compiled_when_used()
def run_site(
    site: Site, source: int, destination: int, n_dimensions: int, dimensions: Words
) -> int:
    """Make a call; return 0, or the address of a text that says what went wrong.

    Parameters
    ----------
    site : Site
        What is called.
    source, destination : int
        Addresses of the input and the output, of C-contiguous elements. They may be equal where
        input and output have one size. The root of a scatter alone reads its input; a reduce or
        gather writes its output on the root alone.
    n_dimensions, dimensions
        The shape of the input; of a scatter that of the root's.

    Returns
    -------
    int
        The text is UTF-8, ends with a zero and stays for a while: copy it.
    """
    door, text, tries, raised = site.door, AGAIN, 0, _raised(site)
    _take(door)
    while text == AGAIN:
        status = _run(site, _prepare(site, source, destination, n_dimensions, dimensions))
        text = 0
        if status != Status.OK:
            answer = call_words(
                door.python,
                site,
                source,
                destination,
                n_dimensions,
                dimensions,
                status,
                tries,
                raised,
            )
            text = _text(door, answer)
        tries += 1
    _end(door)
    return text


@inline
def _prepare_list(site: Site, arrays: NativeArray, count: int) -> Call:
    """Fill in the call block of a fused list; return it, or 0 if Python must check."""
    call = _call_at(site)
    if not call or count < 1 or count > MOST_ARRAYS:
        return Call(0)
    table, end = site.table, 0
    digest = mix(call.base_digest, count)
    for number in range(count):
        array = arrays[number]
        n_dimensions, dimensions = array.n_dimensions, array.dimensions
        size_bytes = count_of(n_dimensions, dimensions) * call.item_bytes
        end = add_row(table.segments[number], end, size_bytes, array.source, array.destination)
        if end < 0:
            return Call(0)
        digest = sign_array(digest, n_dimensions, dimensions)
    call.digest = digest
    return describe(table, call, end, count)


@compiled_when_used()
def run_list_site(site: Site, arrays: NativeArray, count: int) -> int:
    """Reduce a list of arrays of one dtype in one fused call; return like `run_site`."""
    door, text, tries, raised = site.door, AGAIN, 0, _raised(site)
    _take(door)
    while text == AGAIN:
        status = _run(site, _prepare_list(site, arrays, count))
        text = 0
        if status != Status.OK:
            answer = call_words(door.python, site, arrays, 0, count, 0, status, tries, raised)
            text = _text(door, answer)
        tries += 1
    _end(door)
    return text
