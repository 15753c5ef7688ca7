"""One library of all loops: what it has, what is refused, and how it is loaded."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import pytest
from tests.kernels.cpu.elf_reading import Loaded

from gpucoll.blocks import Words
from gpucoll.kernels.cpu import addresses, elf_library, jit, kernel_files, library, linking
from gpucoll.kernels.cpu.elf_object import LinkError
from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import call_loop

_i64 = types.int64
_getpid = types.ExternalFunction("getpid", _i64())
_labs = types.ExternalFunction("labs", _i64(_i64))


@inline
def _doubled(value):
    return 2 * value


@compiled
def fill(block: Words, count):
    """Fill in words with sizes; return their sum."""
    total = 0
    for place in range(count):
        block[place] = _doubled(_labs(place - 5))
        total += block[place]
    return total


@compiled
def fill_by(block, count, address):
    """Have a function at an address do it."""
    return call_loop(address, block, count)


@compiled
def ask():
    """Return this process's number."""
    return _getpid()


@compiled
def careful(value):
    """Raise, which needs Numba."""
    if value > 5:
        raise ValueError("too large")
    return value


def test_loops_and_kernels(tmp_path):
    kernel = addresses._reduce("float64", "max")
    made = linking.linked([fill, fill_by], [(kernel.name, kernel.emit())])
    (tmp_path / "made.so").write_bytes(made)
    loaded = Loaded(tmp_path / "made.so")
    words = (ctypes.c_int64 * 10)()
    run = fill.signature.prototype(loaded.address(fill.symbol))
    assert run(ctypes.addressof(words), 10) == sum(words) == 50
    words = (ctypes.c_int64 * 10)()
    run = fill_by.signature.prototype(loaded.address(fill_by.symbol))
    assert run(ctypes.addressof(words), 10, loaded.address(fill.symbol)) == 50
    assert loaded.address(kernel.name)


def test_a_library_needs_neither_numba_nor_llvm(tmp_path):
    (tmp_path / "made.so").write_bytes(linking.linked([fill], []))
    code = (
        "import ctypes, sys\n"
        f"made = ctypes.CDLL({str(tmp_path / 'made.so')!r})\n"
        "words = (ctypes.c_int64 * 10)()\n"
        f"made[{fill.symbol!r}].restype = ctypes.c_int64\n"
        f"print(made[{fill.symbol!r}](ctypes.c_int64(ctypes.addressof(words)), 10))\n"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "50\n"


def test_a_loop_that_can_raise_is_refused():
    with pytest.raises(LinkError, match=r"need .*numba_.*, which none of them declares"):
        linking.linked([fill, careful], [])


def test_a_function_that_nobody_declared_is_refused(monkeypatch):
    monkeypatch.setattr(jit.ExternalFunction, "declared", {"free"})
    with pytest.raises(LinkError, match="need getpid, which"):
        linking.linked([fill, ask], [])


def wrong_library(path, code):
    module = llvm.parse_assembly(code)
    machine = linking.target_of_numba()
    module.triple = machine.triple
    path.write_bytes(linking.emit(module, machine, ()))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("define void @other() { ret void }", "gpucoll_copy_none_none"),
        ("define void @gpucoll_copy_none_none() { ret void }", "63 bytes were not copied"),
        (
            "declare void @llvm.trap()\n"
            "define void @gpucoll_copy_none_none() { call void @llvm.trap()\n ret void }",
            "exit code -[45]",
        ),
        (
            "define void @gpucoll_copy_none_none() {\n"
            "  store volatile i64 0, ptr inttoptr (i64 8 to ptr)\n  ret void\n}",
            "exit code -11",
        ),
    ],
)
def test_a_library_that_does_not_work_is_noticed(tmp_path, code, said):
    wrong_library(tmp_path / "x.so", code)
    with pytest.raises(LinkError, match=said):
        linking.try_out(tmp_path / "x.so")


def test_a_file_that_is_no_library(tmp_path):
    (tmp_path / "x.so").write_bytes(b"no library")
    with pytest.raises(LinkError, match="does not work here"):
        linking.try_out(tmp_path / "x.so")
    assert library.load(tmp_path / "x.so") is None
    assert library.load(tmp_path / "none.so") is None


def test_without_a_second_process(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(LinkError, match="could not be tried"):
        linking.try_out(tmp_path / "x.so")


class TestFromMemory:
    """As where the cache lies on a file system from which nothing may be run."""

    @pytest.fixture(autouse=True)
    def noexec(self, monkeypatch):
        def refuse(path):
            raise OSError(f"{path}: failed to map segment from shared object")

        monkeypatch.setattr(library, "_load_in_place", refuse)

    def libraries(self, tmp_path):
        for number in range(3):
            code = f"define i64 @number() {{ ret i64 {number} }}"
            module = llvm.parse_assembly(code)
            machine = linking.target_of_numba()
            module.triple = machine.triple
            path = tmp_path / f"{number}.so"
            path.write_bytes(elf_library.link(machine.emit_object(module)))
            yield path

    def test_each_is_its_own(self, tmp_path):
        """The dynamic linker knows libraries by their paths, and all have one descriptor's."""
        before = len(os.listdir("/proc/self/fd"))
        loaded = [Loaded(path) for path in self.libraries(tmp_path)]
        assert len(os.listdir("/proc/self/fd")) == before
        numbers = [each.function("number", ctypes.c_int64)() for each in loaded]
        assert numbers == [0, 1, 2]

    def test_where_that_is_forbidden_too(self, tmp_path, monkeypatch):
        def refuse(*_):
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "memfd_create", refuse)
        assert [library.load(path) for path in self.libraries(tmp_path)] == [None] * 3
        monkeypatch.delattr(os, "memfd_create")
        assert [library.load(path) for path in self.libraries(tmp_path)] == [None] * 3


class TestKept:
    """Kernels in files of their own."""

    def make(self):
        self.made += 1
        kernel = addresses._reduce("int8", "max")
        return linking.linked_kernel(kernel.name, kernel.emit())

    made = 0
    path: Path

    @pytest.fixture(autouse=True)
    def place(self, tmp_path):
        self.path = tmp_path / "gpucoll_reduce_max_int8.so"

    def check(self):
        """Have it loaded, or made; look what it does."""
        found = kernel_files.kept_library(self.path, self.make)
        assert found is not None
        address = found.address("gpucoll_reduce_max_int8")
        assert address is not None
        arrays = [(ctypes.c_int8 * 100)(*values) for values in (range(100), range(100, 0, -1))]
        total = (ctypes.c_int8 * 100)()
        tables = [
            (ctypes.c_int64 * len(each))(*map(ctypes.addressof, each))
            for each in ((total,), arrays)
        ]
        kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 7)(address)
        kernel(ctypes.addressof(tables[0]), 1, ctypes.addressof(tables[1]), 2, 100, 0, 0)
        assert list(total) == [max(n, 100 - n) for n in range(100)]

    def test_is_made_once(self):
        for _ in range(2):
            self.check()
        assert self.made == 1
        assert [path.name for path in self.path.parent.iterdir()] == [self.path.name]
        assert self.path.stat().st_mode & 0o777 == 0o600

    @pytest.mark.parametrize("damage", ["cut", "changed", "empty", "other file", "open to others"])
    def test_damage(self, damage):
        self.check()
        with open(self.path, "rb") as held:  # as a process that runs it has it
            before = held.read()
            if damage == "open to others":
                self.path.chmod(0o666)
            else:
                content = {
                    "cut": before[:-1],
                    "changed": before[:4999] + b"\xcc" + before[5000:],
                    "empty": b"",
                    "other file": before[100:],
                }[damage]
                self.path.unlink()
                self.path.write_bytes(content)
                self.path.chmod(0o600)
            self.check()
            assert self.made == 2
            held.seek(0)
            assert held.read() == before
        assert kernel_files._load(self.path) is not None

    def test_where_it_cannot_be_kept(self, tmp_path, monkeypatch):
        self.path = tmp_path / "none" / "x.so"
        assert kernel_files.kept_library(self.path, self.make) is None

        def refuse():
            raise LinkError("no")

        assert kernel_files.kept_library(tmp_path / "x.so", refuse) is None
        assert not list(tmp_path.iterdir())


def test_types_are_those_of_numba_and_of_c():
    from numba import types as numba_types

    kinds = {name: kind for name, kind in vars(types).items() if isinstance(kind, jit.Kind)}
    for name, kind in kinds.items():
        assert (kind.name, kind.numba) == (name, getattr(numba_types, name))
        if name != "void":
            assert 8 * ctypes.sizeof(kind.c_type) == kind.numba.bitwidth
    signature = types.int64(types.int32, types.float64)
    assert signature.numba == numba_types.int64(numba_types.int32, numba_types.float64)


def test_every_linked_kernel_has_a_name_of_its_own():
    kernels = list(addresses.linked_kernels())
    assert len({kernel.name for kernel in kernels}) == len(kernels)
