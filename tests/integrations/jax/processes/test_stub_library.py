"""The library of stubs: as the dynamic linker and the processor see it."""

from __future__ import annotations

import ctypes
import os
import platform
import stat

import pytest

from gpucoll.errors import BackendUnavailableError
from gpucoll.integrations.jax.processes import library, members, stub_library

FUNCTIONS = [f"function_{number}" for number in range(300)]
WORDS = {f"WORD_{number}": number << 33 for number in range(50)}
INTS = {"first": 1, "second": -2}


@pytest.fixture
def loaded(tmp_path):
    machine = stub_library.MACHINES.get(platform.machine())
    if machine is None:
        pytest.skip("another processor")
    path = tmp_path / "stubs.so"
    path.write_bytes(stub_library.write(machine, FUNCTIONS, WORDS, INTS))
    return ctypes.CDLL(str(path))


def test_constants(loaded):
    for name, value in WORDS.items():
        assert ctypes.c_uint64.in_dll(loaded, name).value == value
    for name, value in INTS.items():
        assert ctypes.c_int.in_dll(loaded, name).value == value


def test_functions_jump_to_their_slots(loaded):
    """With all arguments; an empty slot is an error code."""
    slots = (ctypes.c_void_p * len(FUNCTIONS)).in_dll(loaded, stub_library.SLOTS)
    kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 9)
    assert loaded.function_7() == stub_library.NOT_FILLED
    kept = []
    for number in range(len(FUNCTIONS)):
        kept.append(kind(lambda *given, number=number: 1000 * number + sum(given)))
        slots[number] = ctypes.cast(kept[-1], ctypes.c_void_p).value
    for number in (0, 7, 299):
        function = kind((FUNCTIONS[number], loaded))
        assert function(*range(9)) == 1000 * number + 36
    slots[7] = None
    assert loaded.function_7() == stub_library.NOT_FILLED


@pytest.mark.parametrize("name", stub_library.MACHINES)
def test_every_processor(name):
    """Each stub's jump leads to its slot; decoded here for arm64, where it may not run."""
    machine = stub_library.MACHINES[name]
    stub = machine.stub(0x1000, 0x30008)
    assert len(stub) == 24
    if name == "aarch64":
        load = int.from_bytes(stub[4:8], "little")
        assert load & 0xFF00001F == 0x58000010  # ldr x16, literal
        assert 0x1004 + ((load >> 5 & 0x7FFFF) << 2) == 0x30008
        assert stub[8:12] == bytes.fromhex("500000b4")  # cbz x16, 8 bytes on


def test_a_damaged_file_is_written_again():
    path = library._written(b"content of a library")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700
    path.write_bytes(b"something else")
    assert library._written(b"content of a library").read_bytes() == b"content of a library"
    path.chmod(0o666)
    assert stat.S_IMODE(os.stat(library._written(b"content of a library")).st_mode) == 0o600
    path.unlink()


def test_another_processor_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(BackendUnavailableError, match="x86_64 or aarch64, not Linux on riscv64"):
        library.load({})


def test_a_missing_name_is_an_error(monkeypatch):
    monkeypatch.setattr(library, "_names_of_jaxlib", lambda: (["MPIABI_Send"], ["MPIABI_BYTE"]))
    with pytest.raises(BackendUnavailableError, match="this jaxlib has no DOUBLE"):
        library.load({"DOUBLE": 1, "BYTE": 2})


def test_no_key_of_a_clique_on_the_stack():
    """Memory that is not there is no harm."""
    words = (ctypes.c_uint64 * 2048)(*range(1, 2049))
    words[5] = ctypes.addressof(words)
    words[6] = (1 << 47) - 8
    assert members.find(ctypes.addressof(words), 0, 0, [0, 1]) is None
