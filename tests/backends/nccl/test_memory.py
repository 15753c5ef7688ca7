"""Memory of the library, over the double: registered, taken over by arrays, freed in any order."""

from __future__ import annotations

import gc
import os
import threading

import numpy as np
import pytest
from tests.doubles.communicators import communicator

from gpucoll.backends.gpu import abandoned
from gpucoll.backends.nccl.library import IN_PROGRESS
from gpucoll.backends.nccl.memory import Registrations
from gpucoll.backends.nccl.prototypes import ncclDataType_t, ncclRedOp_t
from gpucoll.errors import BackendError, StateError

VENDORS = pytest.mark.parametrize("vendor", ["nccl", "rccl"])
FLOAT32, SUM = ncclDataType_t.ncclFloat32, ncclRedOp_t.ncclSum
PAGE = 4096


@pytest.fixture
def call(gpu_ranks, doubles):
    def call(function, *args, vendor="nccl", world_size=1):
        double = doubles.double(vendor)
        answers = gpu_ranks.call(
            world_size, function, double, *args, gives="seat", environment=double.variables
        )
        assert answers == [answers[0]] * world_size
        return answers[0]

    return call


def registrations_of(comm):
    gc.collect()  # what earlier tests left in this process shall not go while memory is counted
    return Registrations(comm.library, comm.device, comm.handle)


def close(comm, made):
    """End a communicator as a backend does."""
    made.close()
    comm.library.check(comm.functions.ncclCommDestroy(comm.handle), "ncclCommDestroy")
    comm.handle = 0
    made.collect()


def reduce_in_it(seat, double):
    with communicator(seat, double) as comm:
        made, in_use = registrations_of(comm), comm.control.count("memory")
        memory = made.allocate(100)
        array = memory.array((5, 5), "float32")
        view = np.frombuffer(comm.view(memory.address, 100), np.float32)
        view[:] = comm.rank + 1
        before = comm.control.registrations, memory.size_bytes, comm.control.calls("ncclMemAlloc")
        address = array.__cuda_array_interface__["data"][0]
        assert comm.call("ncclAllReduce", address, address, 25, FLOAT32, SUM) == 0
        comm.synchronize()
        result = set(view.tolist())
        close(comm, made)
        del array, memory
        gc.collect()
        abandoned.end_all()
        assert comm.control.count("memory") <= in_use
        return before[:2], before[2] > 0, result, comm.control.registrations


@pytest.mark.soak(quick=1)
@VENDORS
def test_collectives_work_in_it(call, vendor):
    answer = call(reduce_in_it, vendor=vendor, world_size=2)
    assert answer == ((1, PAGE), True, {3.0}, 0)


def array_first(seat, double):
    with communicator(seat, double) as comm:
        made, before = registrations_of(comm), comm.control.count("memory")
        array = made.allocate(10).array((10,), "uint8")
        during = comm.control.count("memory") - before, comm.control.registrations
        del array
        gc.collect()
        buried = comm.control.count("memory") - before, comm.control.registrations
        made.collect()
        return during, buried, comm.control.count("memory") - before, comm.control.registrations


def test_the_array_dies_first(call):
    # Not at once: the collector may run where the library may not be called.
    assert call(array_first) == ((PAGE, 1), (PAGE, 1), 0, 0)


def communicator_first(seat, double):
    with communicator(seat, double) as comm:
        made, before = registrations_of(comm), comm.control.count("memory")
        one, two = made.allocate(10), made.allocate(10)
        array = one.array((10,), "uint8")
        (registration,) = one.held
        del two
        close(comm, made)
        closed = comm.control.count("memory") - before, comm.control.registrations
        assert not registration.is_open
        registration.close()
        assert comm.view(array.address, 10)[:1] == b"\xa5"  # still there
        with pytest.raises(StateError, match="cannot allocate memory: the communicator is closed"):
            made.allocate(1)
        with pytest.raises(StateError, match="cannot register memory"):
            made.register(array.address, 10)
        del one, array
        gc.collect()
        assert comm.control.count("memory") == before + PAGE  # it may be collected anywhere
        abandoned.end_all()
        assert comm.control.count("memory") == before
        return closed


def test_the_communicator_is_closed_first(call):
    assert call(communicator_first) == (PAGE, 0)


def aborted_in_the_middle(seat, double):
    """Work hangs in the memory: closing must not wait for it."""
    with communicator(seat, double) as comm, comm.control.library_set(hang_at=1):
        made, before = registrations_of(comm), comm.control.count("memory")
        memory = made.allocate(16)
        comm.call("ncclAllReduce", memory.address, memory.address, 4, FLOAT32, SUM)
        del memory
        gc.collect()
        calls = comm.control.calls("ncclCommDeregister")
        made.close(is_aborting=True)
        comm.functions.ncclCommAbort(comm.handle)
        comm.handle = 0
        made.collect()
        assert comm.control.calls("ncclCommDeregister") == calls  # it might have hung
        # What earlier tests left in this process may have gone, too.
        return comm.control.registrations, comm.control.count("memory") <= before


def test_an_abort_while_it_is_in_use(call):
    assert call(aborted_in_the_middle, world_size=2) == (0, True)


def waited_for_without_the_lock(seat, double):
    """Work hangs until another thread gives the communicator up, which needs the lock."""
    with communicator(seat, double) as comm, comm.control.library_set(hang_at=1):
        made, before, lock = registrations_of(comm), comm.control.count("memory"), threading.Lock()
        memory = made.allocate(16)
        comm.call("ncclAllReduce", memory.address, memory.address, 4, FLOAT32, SUM)
        del memory
        gc.collect()

        entered, synchronize = threading.Event(), comm.device.synchronize

        def announce():
            entered.set()
            synchronize()

        def give_up():
            assert entered.wait(20)
            with lock:
                made.close(is_aborting=True)
                comm.functions.ncclCommAbort(comm.handle)

        thread = threading.Thread(target=give_up)
        thread.start()
        vars(comm.device)["synchronize"] = announce
        try:
            made.collect(lock)
        finally:
            del vars(comm.device)["synchronize"]
        thread.join()
        comm.handle = 0
        return comm.control.count("memory") - before


def test_a_hang_while_memory_is_given_back(call):
    assert call(waited_for_without_the_lock, world_size=2) == 0


def pending_work(seat, double):
    """The last array goes while work is still on its way: the memory stays until that is done."""
    with communicator(seat, double) as comm, comm.device:
        made, result = registrations_of(comm), comm.memory(np.zeros(4, np.float32))
        memory = made.allocate(16)
        comm.device.fill(memory.address, b"\0\0\x80\x3f", 4, comm.stream)
        with comm.control.held():
            comm.device.copy(result.address, memory.address, 16, comm.stream)
            del memory
            gc.collect()
        made.collect()  # waits; memory that is unmapped too early would end the process
        return result.array.tolist()


def test_memory_is_not_freed_under_a_kernel(call):
    assert call(pending_work) == [1.0] * 4


def user_memory(seat, double):
    with communicator(seat, double) as comm:
        made, x = registrations_of(comm), comm.memory(np.ones(4, np.float32))
        registration = made.register(x.address, 16)
        during = comm.control.registrations, registration.is_open
        registration.close()
        registration.close()
        after = comm.control.registrations, registration.is_open
        made.register(x.address, 16)
        with pytest.raises(BackendError, match=r"ncclCommRegister of 8 bytes: .*not memory of"):
            made.register(8, 8)
        close(comm, made)
        return during, after, comm.control.registrations


def test_memory_of_the_user(call):
    assert call(user_memory) == ((1, True), (0, False), 0)


def windows(seat, double, polls):
    control = double.load()
    with (
        control.library_set(polls=polls),
        communicator(seat, double, is_blocking=not polls) as comm,
    ):

        def settle(code):
            seen.append(code)
            while (code := comm.library.async_error(comm.handle)) == IN_PROGRESS:
                pass
            return code

        seen: list[int] = []
        settle(comm.init_code)
        made = registrations_of(comm)
        memory = made.allocate(5000, is_registered=False)
        assert comm.control.registrations == 0
        made.register_window(memory, settle)
        (window,) = memory.held
        answer = seen[1:], window.window == 1, window.handle > 0, memory.size_bytes
        settle(comm.functions.ncclCommFinalize(comm.handle))
        close(comm, made)
        return *answer, comm.control.registrations


@pytest.mark.parametrize("polls", [0, 3])
def test_symmetric_windows(call, polls):
    assert call(windows, polls, world_size=2) == ([0], True, True, 2 * PAGE, 0)


def unregistered(seat, double):
    with communicator(seat, double) as comm:
        made, before = registrations_of(comm), comm.control.count("memory")
        memory = made.allocate(16)
        nothing = made.register(memory.address, 16)
        held = list(memory.held)
        del memory
        gc.collect()
        close(comm, made)
        return held, nothing, comm.control.count("memory") - before


def test_a_library_without_registration(rank_server, doubles):
    absent = ("ncclMemAlloc", "ncclMemFree", "ncclCommRegister", "ncclCommWindowRegister")
    double = doubles.double(without=absent)
    with rank_server.fork(1) as pool:
        answers = pool.call(unregistered, double, gives="seat", environment=double.variables)
    assert answers == [([], None, 0)]


def failures(seat, double):
    with communicator(seat, double) as comm:
        made, before = registrations_of(comm), comm.control.count("memory")
        with pytest.raises(MemoryError, match=r"ncclMemAlloc of 10995116277760 bytes.* are free"):
            made.allocate(10 << 40)
        comm.control.fail_at(1, 3, "ncclCommRegister")
        with pytest.raises(BackendError, match="ncclCommRegister of 4096 bytes: internal error"):
            made.allocate(1)
        gc.collect()
        made.collect()
        assert comm.control.count("memory") == before
        comm.control.fail_at(1, 2, "ncclMemAlloc")
        with pytest.raises(BackendError, match="ncclMemAlloc of 4096 bytes: unhandled system"):
            made.allocate(1)
        memory = made.allocate(1)
        comm.control.fail_at(1, 3, "ncclCommDeregister")
        made.close()  # the communicator is ending: nothing to say
        del memory
        gc.collect()
        abandoned.end_all()
        assert comm.control.count("memory") == before


def test_failures(call):
    call(failures)


def forked(seat, double):
    with communicator(seat, double) as comm:
        made = registrations_of(comm)
        memory = [made.allocate(1)]
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            memory.clear()
            gc.collect()
            os.write(writer, bytes([len(made._dead)]))
            os._exit(0)
        os.waitpid(child, 0)
        said = os.read(reader, 1)
        os.close(reader)
        os.close(writer)
        return said, len(made._dead)


def test_a_forked_child_frees_nothing(call):
    assert call(forked) == (b"\0", 0)
