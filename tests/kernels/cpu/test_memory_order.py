"""What orders loads and stores of shared memory, in the code for arm64: all of it, by a table.

On x86-64 nearly every order is there anyway, so that a mistake would not show. What each of these
is for: docs/decisions/0029-memory-order.md.
"""

from __future__ import annotations

import importlib
import platform
import re
from pathlib import Path

import llvmlite.binding as llvm
import pytest

import gpucoll.backends.precompile as compiled_modules

KINDS = {
    "ldapr": "A",  # a load before all that comes after it
    "ldar": "O",  # and after every exchange and release store before it
    "stlr": "S",  # a store after all that comes before it
    "stlxr": "X",  # an exchange: such a store, and such a load
    "dmb ishld": "L",  # loads before it are before all that comes after it
    "dmb ish": "F",  # everything is
}
"""Instructions of arm64; of cores with the first, that and `ldar` differ."""
FREE_ON_X86 = set("ASL+")
"""Plain moves there: its loads and stores have that order by themselves."""

ORDERS = {
    "transport.shared.flags.signal": "XO",
    "transport.shared.flags.signal_header": "XO",
    "transport.shared.flags.ring": "OX",
    "transport.shared.flags.begin_to_sleep": "XO",
    "transport.shared.flags.end_sleep": "X",
    "transport.shared.flags._sleep_slice": "AXOX",
    "transport.shared.flags._yield_until": "A",
    "transport.shared.flags.wait_counter": "A+",
    "transport.shared.flags.wait_header": "A+",
    "transport.shared.flags._lost_rank": "A",
    "transport.shared.flags.give_up": "XF+",
    "transport.shared.flags.is_aborted_since": "L",
    "transport.shared.flags.event_pending_since": "L",
    "transport.shared.flags._event_unless_reached": "LA",
    "transport.shared.room._take_payloads": "AS",
    "transport.shared.spans._begin_span": "XX",  # its place; not ready
    "transport.shared.spans.write_span": "XXS",  # the same; ready
    "transport.shared.spans.time_if_watched": "X",
    "transport.shared.peer_memory.arena_of": "A",
    "transport.shared.peer_memory.reach": "A",
    "transport.shared.peer_memory._map_growth": "AX",
    "memory.heap.lock": "X+",
    "memory.heap.unlock": "X",
    "transport.shared.steps.close_record": "S",
    "entries.collectives.run_without_python": "X",  # the state; whoever closes does the same
    "entries.native._take": "X+",
    "entries.native._give_back": "X",
    "entries.pending.post_ahead": "A",
    "entries.pending.run_pending": "A+XOX",  # DONE, then the bell's sleepers
    "entries.pending.begin_running": "X",
    "entries.pending._become_idle": "SX",  # nobody runs calls; then the state
    "entries.pending.end_running": "A(XSX|SXO?|XXS)+OXAOX",  # no room, OK, failed; then both bells
    "entries.pending._has_work": "AAA",
    "entries.pending._serve": "A+XA+",
    "entries.pending.want_thread": "XOX",
    "entries.pending._is_wanted": "AAXOX",  # wanted no more, then whether something is pending
    "entries.pending._step_messages": "A+XOXA+XA+",
    "entries.pending._look_at_all": "A+XOXA+XA+",  # CURRENT, then whether it is still there
    "entries.messages.row_state": "A",
    "entries.started._start": "XAX+OX",
    "entries.started._sleep_until": "AXOOOX",
    "entries.started._has_arrived": "A",
    "entries.started._finish_arrived": "A+XOX",  # as `run_pending`
    "backends.gpu.enqueue_entry._step": "X",
    "backends.gpu.enqueue_entry._is_gone": "O+",
    "group.host.enqueued._is_full": "A",
    "group.host.enqueued.post": "AXS",
    "group.host.enqueued._compare_one": "A",
    "transport.shared.flags._step_messages": "A",
    "transport.shared.flags.dead_rank": "A",
    "backends.cpu.host.mailboxes.open_mailbox": "X",
    "backends.cpu.host.mailboxes._open_incoming": "A",
    "backends.cpu.host.mailboxes.publish": "XOX",
    "backends.cpu.host.mailboxes._go_to_start": "S",
    "backends.cpu.host.mailboxes._go_to_other": "S",
    "backends.cpu.host.mailboxes.written_record": "A+",
    "backends.cpu.host.mailboxes._look_at_tail": "A",
    "backends.cpu.host.mailboxes.give_back": "XOX",
    "backends.cpu.host.mailboxes.matched_bytes": "A",
    "backends.cpu.host.mailboxes.note_matched": "S",
    "backends.cpu.host.sending._is_acknowledged": "A",
    "backends.cpu.host.receiving.acknowledge": "XOX",
    "backends.cpu.host.mailboxes.finish": "S",
    "backends.cpu.host.mailboxes.try_lock": "X",
    "backends.cpu.host.mailboxes.unlock": "S",
    "backends.cpu.wires.loop._n_wires": "A",
    "backends.cpu.wires.loop._has_come": "A",  # a frame that another thread has opened
    "backends.cpu.host.message_loop._has_left": "A+",
    "backends.cpu.host.message_loop._answer": "X",
    "transport.shared.peer_memory.can_read": "A",
    "tables.loops._late_member": "AA",
    "tables.loops._lock": "XXAX",  # a torn row's too; a free one again before the exchange
    "tables.loops._unlock": "XX",
    "devices.host.loop._ring": "OX",
    "devices.host.loop._announce": "XO",
    "devices.host.loop._leave": "X",
    "devices.host.loop._event_at": "A",
    "devices.host.loop._failure": "A",
    "devices.host.loop._is_over": "A",
    "devices.host.loop._lock": "X+",
    "devices.host.loop._wait_for_room": "A+XOOXA+",
    "devices.host.loop._append": "A+XO+XA+X+OX",  # the tail, the lock; then the thread's bell
    "devices.host.loop._must_end": "AA",
    "devices.host.loop._wait_for_stream": "A+XOOXA+",
    "devices.host.loop._wait_for_value": "A+",
    "devices.host.loop._run": "A+XO+XA+",
    "devices.host.loop._wait_for_command": "A+XOOOX",  # announced; the tail, STOP, the bell
}
"""Functions that compiled code calls, and what of `KINDS` they have, in this order."""

ENTRIES = {
    "transport.shared.flags.wait_long": ".*A",
    "transport.shared.flags.wait_long_alone": "AX?O?X?|AXOX",
    "transport.shared.flags.event_compare_exchange": "XF+",
    "transport.shared.flags.event_store": "X",
    "transport.shared.ordering.word_load": "A",
    "transport.shared.ordering.word_load_after": "FA",
    "transport.shared.room.take_memory": ".*AS",
    "transport.shared.spans.note_arrival": "X",
    "transport.shared.spans.note_end": "XXS",
    "transport.shared.spans.note_span": "XXS",
    "transport.shared.spans.note_message": "XXS",
    "transport.shared.peer_memory.map_more": "AX.*AX+",
    "backends.gpu.enqueue_entry.step_call": "XO",
    "backends.gpu.enqueue_entry.enqueue_call": "XO+X+",  # out of the driver; gone?; and again
    "group.host.enqueued.post_call": "AXS",
    "group.host.enqueued.compare_calls": "AAA+X",
    "memory.heap.take": "X+",
    "memory.heap.give": "X+",
    "memory.numpy_memory.resize": "X+",
    "group.host.channel.exchange_loop": ".*XO.*",
    "backends.cpu.host.message_loop.message_loop": ".*XOA.*",
    "backends.cpu.host.message_step.message_step": "XA?SA?OX",
    "backends.cpu.host.message_step.message_post": "XXSA?OXX?S",
    "backends.cpu.host.message_step.message_drop": "XX(SAS|ASSS)",  # of Python 3.11 on; of 3.10
    "backends.cpu.host.message_step.message_refuse": "XXS+OX",
    "backends.cpu.host.message_step.message_end": "XXS",
    "backends.cpu.host.message_step.message_put_back": "XXS",
    "backends.cpu.wires.loop.wires_step": "XA*SAO.*",  # the lock; then IS_LOOKING, sleepers
    "backends.cpu.wires.loop.wires_post": "X.*S.*",
    "backends.cpu.host.movements.movement_loop": ".*XO.*",
    "backends.cpu.host.movements.movement_post": "XO",
    "backends.cpu.host.movements.movement_finish": ".*XO.*",
    "backends.cpu.host.reductions.reduction_loop": ".*XO.*",
    "backends.cpu.host.reductions.reduction_post": "XO",
    "backends.cpu.host.reductions.reduction_finish": ".*XO.*",
    "transport.tcp.small_calls.small_call": ".*XO.*",
    "backends.mpi.collectives.mpi_call": ".*XO.*",
    "entries.native.run_site": "X+",
    "entries.native.run_list_site": "X+",
    "entries.pending.serve_started": "A.*XO.*XO.*OX",  # CURRENT; then the announcement, STOP
    "entries.pending.ask_thread": "XOX",
    "entries.pending.wake_thread": "OX",
    "entries.messages.start_entry": "A",
    "entries.messages.wait_entry": "A",
    "entries.messages.take_entry": "A",
    "entries.messages.fetch_entry": "A",
    "entries.messages.receive_entry": "A",
    "entries.messages.probe_entry": "A",
    "entries.started.start_entry": "XAX+OX",
    "entries.started.start_block": "XAX+OX",
    "entries.started.wait_started": "AXA+XOOOX",
    "entries.started.poll_started": "AXA+XOX",
    "entries.started.sleep_started": "XOOOXA",
    "entries.started.skip_started": "XAX",
    "tables.loops.push_rows": ".*XAX.*",
    "tables.loops.wait_for_clocks": "A+XOA+X",
    "tables.loops.advance_clock": "XOX",
    "tables.loops.note_clock": "XOX",
    "devices.host.loop.put_command": "A",
    "devices.host.loop.put_exit": ".*XXOX",
    "devices.host.loop.record_event": "AAX",  # on the stream, then what the event stands for
    "devices.host.loop.stream_wait_event": "A+",
    "devices.host.loop.query_event": "A+",
    "devices.host.loop.stream_wait_value": "A",
    "devices.host.loop.stream_write_value": "A",
    "devices.host.loop.is_capturing": "S",
    "devices.host.loop.get_device": "S",
    "devices.host.loop.wait_for": "A+XOOXA+",
    "devices.host.loop.run_stream": "A.*XO+X.*XOX",  # DONE, then who waits for it
    "devices.host.loop.stop_all": "XA+X+",
}
"""Entries that order memory, themselves or in the functions above."""

UNORDERED = (
    "transport.shared.room.reserve_part",
    "memory.heap.begin",
    "memory.numpy_memory.allocate",
    "memory.numpy_memory.allocate_zeros",
    "memory.numpy_memory.release",
    "entries.collectives.prepared_call",
    "entries.collectives.queued_call",
    "entries.collective_entry.collective_entry",
    "entries.lists.list_entry",
    "entries.objects.object_entry",
    "entries.block_entry.block_entry",
    "entries.messages.message_entry",
    "entries.messages.planned_message",
    "entries.messages.let_go_entry",
    "entries.started.reap_started",
    "entries.started.hold_started",
    "entries.mpi_functions.all_gather",
    "entries.mpi_functions.all_reduce",
    "entries.mpi_functions.reduce_scatter",
    "integrations.jax.compiled.handler.handle_call",
    "integrations.tensorflow.compiled.kernels.custom_call",
    "integrations.tensorflow.compiled.kernels.kernel_call",
    "backends.cpu.host.message_step.message_release",
    "backends.cpu.wires.loop.wires_fetch",
    "backends.mpi.carriers.carry_away",
    "backends.mpi.carriers.carry_here",
    "transport.tcp.stream_plan.plan_streams",
    "transport.tcp.stream_loop.run_streams",
    "transport.tcp.exchange.begin",
    "transport.tcp.exchange.proceed",
    "transport.tcp.small_calls.is_large",
    "backends.mpi.exchange.go_on_by_mpi",
    "tables.loops.place_outside",
    "tables.loops.take_rows",
    "tables.owner_loops.count_owners",
    "tables.owner_loops.divide_rows",
    "tables.owner_loops.rows_of_host",
    "tables.owner_loops.sort_by_owner",
    "devices.host.loop.set_device",
    "devices.host.loop.place_of",
)
"""Entries that leave it to the loops they call, by address, or touch private memory alone."""

READ_NUMPY = {
    "entries.block_arguments._have_same_rows",
    "entries.block_arguments.is_array",
    "entries.block_arguments.row_count_of",
    "entries.block_entry.describe_equal",
    "entries.block_entry.show",
    "entries.collectives.count_elements",
    "entries.collective_entry.fill",
    "entries.collectives.is_usable",
    "entries.lists._add_arrays",
    "entries.messages._fill_row",
    "entries.messages.prepare_message",
}
"""They read 32-bit fields of NumPy's arrays, for which there is no other load."""


COPIES = {
    "backends.cpu.host.message_step.message_step": {"is_aborted_since"},
    "backends.cpu.host.message_step.message_post": {"is_aborted_since"},
    "backends.cpu.host.movements.movement_loop": {"event_pending_since"},
    "backends.cpu.host.reductions.reduction_loop": {"event_pending_since"},
    "backends.cpu.host.movements.movement_finish": {"event_pending_since"},
    "backends.cpu.host.reductions.reduction_finish": {"event_pending_since"},
}
"""What copies or reduces peers' memory, and looks afterwards whether it was still good."""


@pytest.fixture(scope="module", autouse=True)
def all_targets():
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def events_of(text: str) -> list[str]:
    """Return what orders memory in each function of a module's code for arm64."""
    module = llvm.parse_assembly(text)
    machine = llvm.Target.from_triple(module.triple).create_target_machine(
        cpu="generic", features="+neon,+rcpc", opt=3
    )
    assert "aarch64" in module.triple
    found, events = [], ""
    for line in machine.emit_assembly(module).splitlines():
        if line.startswith(".Lfunc_end"):
            found.append(events)
            events = ""
        instruction = re.match(rf"\s+({'|'.join(KINDS)})\b", re.sub(r"\s+", " ", line))
        if instruction:
            events += KINDS[instruction[1]]
    assert not events
    return found


def is_ordered(pattern: str, events: str) -> bool:
    """Return whether events are as they must be, or stronger."""
    return re.fullmatch(pattern.replace("A", "[AO]"), events) is not None


def without_package(names):
    return {name.removeprefix("gpucoll.") for name in names}


def test_every_function_is_in_the_table(arm_code):
    assert without_package(arm_code["functions"]) == {*ORDERS, *READ_NUMPY}
    assert without_package(arm_code["entries"]) == {*ENTRIES, *UNORDERED}
    modules = {name.rpartition(".")[0] for name in arm_code["entries"]}
    assert modules == {*compiled_modules.MODULES, *compiled_modules.MODULES_WHEN_USED}


@pytest.mark.parametrize("name", ORDERS)
def test_functions(arm_code, name):
    found = events_of(arm_code["functions"][f"gpucoll.{name}"])  # of what is not inlined, too
    assert any(is_ordered(ORDERS[name], events) for events in found), (name, found)


@pytest.mark.parametrize("name", ENTRIES)
def test_entries(arm_code, name):
    found = events_of(arm_code["entries"][f"gpucoll.{name}"])
    assert any(is_ordered(ENTRIES[name], events) for events in found), (name, found)
    together = "".join(found)
    for function in arm_code["calls"][f"gpucoll.{name}"]:  # nothing is lost where it is inlined
        for kind in filter(str.isalpha, ORDERS.get(function.removeprefix("gpucoll."), "")):
            kinds = "AO" if kind == "A" else kind
            assert set(kinds) & set(together), (name, function, together)


@pytest.mark.parametrize("name", COPIES)
def test_what_copies_peers_memory_looks_afterwards(arm_code, name):
    called = {function.rpartition(".")[2] for function in arm_code["calls"][f"gpucoll.{name}"]}
    assert called >= COPIES[name]
    assert "L" in "".join(events_of(arm_code["entries"][f"gpucoll.{name}"]))


@pytest.mark.parametrize("name", UNORDERED)
def test_entries_that_leave_it_to_others(arm_code, name):
    called = without_package(arm_code["calls"][f"gpucoll.{name}"])
    assert called <= READ_NUMPY
    assert set("".join(events_of(arm_code["entries"][f"gpucoll.{name}"]))) <= {"A", "O"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="looks at code for x86-64")
@pytest.mark.parametrize("name", [name for name in ORDERS if FREE_ON_X86.issuperset(ORDERS[name])])
def test_loads_and_release_stores_are_plain_moves_on_x86(name):
    module, _, name_there = name.rpartition(".")
    function = getattr(importlib.import_module(f"gpucoll.{module}"), name_there)
    function.dispatcher.compile(function.types)
    code = function.dispatcher.inspect_asm(function.types)
    assert not re.search(r"\b(lock|xchg\w*|[mls]fence)\b", code)


def test_the_table_is_explained():
    path = Path(__file__).parents[3] / "docs" / "decisions" / "0029-memory-order.md"
    text = path.read_text()
    for name in (*ORDERS, *ENTRIES):
        assert f"`{name.rpartition('.')[2].removeprefix('_')}`" in text, name
