"""The linker of compiled loops: what it makes runs here and would on arm64; what it refuses."""

from __future__ import annotations

import ctypes
import platform
import shutil
import struct
import subprocess

import llvmlite.binding as llvm
import pytest
from tests.kernels.cpu.elf_reading import Loaded, ReadLibrary, pair_target

from gpucoll.kernels.cpu import elf_library, library
from gpucoll.kernels.cpu.elf_machines import Arm
from gpucoll.kernels.cpu.elf_object import LinkError, read_object

CODE = """
@numbers = internal constant [4 x double] [double 1.5, double 2.5, double 3.5, double 4.5]
@words = internal constant <4 x i32> <i32 1, i32 2, i32 3, i32 4>
declare i64 @strlen(ptr) nonlazybind
declare i64 @labs(i64)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define double @number(i64 %place) {
  %where = getelementptr double, ptr @numbers, i64 %place
  %value = load double, ptr %where
  ret double %value
}
define void @four(ptr %out) {
  %value = load <4 x i32>, ptr @words
  store <4 x i32> %value, ptr %out, align 1
  ret void
}
define i64 @length(ptr %text) {
  %count = call i64 @strlen(ptr %text)
  ret i64 %count
}
define i64 @distance(i64 %a, i64 %b) {
  %difference = sub i64 %a, %b
  %size = call i64 @labs(i64 %difference)
  ret i64 %size
}
define void @copy(ptr %to, ptr %from, i64 %size) {
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %size, i1 false)
  ret void
}
define i64 @twice(i64 %a, i64 %b) noinline {
  %once = call i64 @distance(i64 %a, i64 %b)
  %sum = add i64 %once, %once
  ret i64 %sum
}
define ptr @where_numbers_are() {
  ret ptr @numbers
}
define ptr @where_length_is() {
  ret ptr @length
}
define i64 @chosen(i64 %n) {
  switch i64 %n, label %other [
    i64 0, label %zero i64 1, label %one i64 2, label %two i64 3, label %three i64 4, label %four
  ]
zero:
  %a = call i64 @twice(i64 %n, i64 7)
  ret i64 %a
one:
  ret i64 71
two:
  %c = call i64 @distance(i64 %n, i64 9)
  ret i64 %c
three:
  ret i64 -5
four:
  %d = mul i64 %n, 1000
  ret i64 %d
other:
  ret i64 -1
}
"""
HERE = llvm.get_process_triple()
ARM = "aarch64-unknown-linux-gnu"
EXPORTS = ("number", "four", "length", "distance", "copy", "twice", "where_numbers_are", "chosen")
is_known = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64"), reason="no linker for this processor"
)


@pytest.fixture(scope="module", autouse=True)
def all_targets():
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def compiled(code: str, triple: str, relocation: str = "pic", **options) -> bytes:
    """Return the object file of LLVM IR."""
    module = llvm.parse_assembly(code)
    module.triple = triple
    machine = llvm.Target.from_triple(triple).create_target_machine(
        opt=3, reloc=relocation, **{"codemodel": "small", **options}
    )
    return machine.emit_object(module)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    made = tmp_path_factory.mktemp("linked") / "made.so"
    made.write_bytes(elf_library.link(compiled(CODE, HERE)))
    return made


@pytest.fixture(scope="module")
def functions(path):
    loaded = Loaded(path)
    word, pointer = ctypes.c_int64, ctypes.c_void_p
    prototypes = {
        "number": (ctypes.c_double, word),
        "four": (None, pointer),
        "length": (word, ctypes.c_char_p),
        "distance": (word, word, word),
        "copy": (None, ctypes.c_char_p, ctypes.c_char_p, word),
        "where_numbers_are": (pointer,),
        "where_length_is": (pointer,),
        "chosen": (word, word),
    }
    return {name: loaded.function(name, *prototype) for name, prototype in prototypes.items()}


@is_known
class TestHere:
    def test_constants(self, functions):
        assert [functions["number"](n) for n in range(4)] == [1.5, 2.5, 3.5, 4.5]
        words = (ctypes.c_int32 * 4)()
        functions["four"](ctypes.addressof(words))
        assert list(words) == [1, 2, 3, 4]
        numbers = (ctypes.c_double * 4).from_address(functions["where_numbers_are"]())
        assert list(numbers) == [1.5, 2.5, 3.5, 4.5]

    def test_functions_elsewhere(self, functions):
        """Through the table of addresses, by a jump, and where LLVM itself calls one."""
        assert functions["length"](b"seven..") == 7
        assert functions["distance"](3, 10) == 7
        made = ctypes.create_string_buffer(1000)
        functions["copy"](made, bytes(range(1, 201)) * 5, 999)
        assert made.raw == (bytes(range(1, 201)) * 5)[:999] + b"\0"

    def test_functions_of_its_own(self, functions, path):
        assert [functions["chosen"](n) for n in range(-1, 6)] == [-1, 14, 71, 7, -5, 4000, -1]
        assert functions["where_length_is"]() == Loaded(path).address("length")

    def test_names_that_it_does_not_have(self, path):
        loaded = library.load(path)
        assert loaded is not None
        assert (loaded.address("numbers"), loaded.address("none")) == (None, None)

    def test_tools_find_nothing_wrong(self, path):
        if shutil.which("readelf") is None:
            pytest.skip("binutils' readelf is not here")
        command = ["readelf", "--wide", "--all", "--use-dynamic", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert done.stderr == ""
        assert all(name in done.stdout for name in EXPORTS)

    def test_a_debugger_finds_the_entries(self, path):
        if shutil.which("gdb") is None:
            pytest.skip("gdb is not here")
        command = ["gdb", "-nx", "-batch", "-ex", "info address chosen", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert '"chosen" is at 0x' in done.stdout

    def test_nothing_can_be_written_to_what_can_be_run(self, path):
        """Nor can the table of addresses be written to once it is filled."""
        segments = ReadLibrary(path.read_bytes()).segments
        assert all(flags & 3 != 3 for _, flags, *_ in segments)
        (table,) = (each for each in segments if each[0] == 1 and each[1] & 2)
        (protected,) = (each for each in segments if each[0] == 0x6474E552)
        assert (table[3], table[6]) == (protected[3], protected[6])

    def test_a_symbol_that_nobody_has(self, tmp_path):
        code = "declare void @nobody_has_this() nonlazybind\ndefine void @f() {\n"
        code += "  call void @nobody_has_this()\n  ret void\n}"
        (tmp_path / "x.so").write_bytes(elf_library.link(compiled(code, HERE)))
        assert library.load(tmp_path / "x.so") is None

    def test_many_names(self, tmp_path):
        """Every one is found, whatever place its hash has."""
        names = [f"function_{n}" for n in range(300)]
        code = "\n".join(f"define i64 @{name}() {{ ret i64 {n} }}" for n, name in enumerate(names))
        (tmp_path / "x.so").write_bytes(elf_library.link(compiled(code, HERE)))
        loaded = Loaded(tmp_path / "x.so")
        found = [loaded.function(name, ctypes.c_int64)() for name in names]
        assert found == list(range(300))


@pytest.fixture(scope="module")
def source():
    return read_object(compiled(CODE, ARM))


@pytest.fixture(scope="module")
def made():
    return ReadLibrary(elf_library.link(compiled(CODE, ARM)))


class TestArm:
    """No such machine here: every place that was filled in is read back from the code."""

    def test_exports(self, made):
        assert all(made.find(name) > 0 for name in EXPORTS)
        assert made.find("none") == 0

    def test_imports(self, made):
        """GLOB_DAT for what is elsewhere, RELATIVE for what is here."""
        found = {(each.name, each.kind) for each in made.imports() if each.name}
        assert found == {(name, 1025) for name in ("labs", "memcpy", "strlen")}
        own = {each.addend for each in made.imports() if not each.name}
        assert {each.kind for each in made.imports() if not each.name} <= {1027}
        assert own <= {made.find(name) for name in (*EXPORTS, "where_length_is", "length")}

    def test_every_relocation(self, made, source):
        entries = {each.place: each.name or each.addend for each in made.imports()}
        n_checked = 0
        pages: dict[tuple[int, int, int], int] = {}
        names = {n: each.name for n, each in enumerate(source.sections)}
        for each in source.relocations:
            if names[each.section] != ".text":
                continue
            symbol = source.symbols[each.symbol]
            start = made.find("number") - self.offset_of(source, "number")
            here = start + each.offset
            (word,) = struct.unpack_from("<I", made.data, here)
            if each.kind in (275, 311):
                pages[each.symbol, each.addend, each.kind == 311] = here
            elif each.kind in (282, 283):
                distance = (word & 0x3FFFFFF) - ((word & 0x2000000) << 1)
                assert self.called(made, entries, here + 4 * distance) in (
                    symbol.name,
                    made.find(symbol.name),
                )
                n_checked += 1
            else:
                first = pages[each.symbol, each.addend, each.kind == 312]
                (page,) = struct.unpack_from("<I", made.data, first)
                to = pair_target(page, word, first)
                if each.kind == 312:
                    assert entries[to] in (symbol.name, made.find(symbol.name))
                else:
                    data = source.sections[symbol.section].data
                    offset = symbol.value + each.addend
                    assert made.data[to : to + 8] == data[offset : offset + 8]
                n_checked += 1
        assert n_checked >= 6

    def offset_of(self, source, name):
        (found,) = (each.value for each in source.symbols if each.name == name)
        return found

    def called(self, made, entries, to):
        """Return the name behind a jump through the table, or the address itself."""
        words = struct.unpack_from("<3I", made.data, to)
        if words[2] != 0xD61F0220:  # br x17
            return to
        return entries[pair_target(words[0], words[1], to)]

    def test_what_does_not_fit(self):
        for kind, to in ((275, 1 << 40), (283, 1 << 30), (274, 1 << 24), (261, 1 << 40)):
            with pytest.raises(LinkError):
                Arm().apply(bytearray(8), 0, kind, 0, to)
        with pytest.raises(LinkError, match="not a multiple of 8"):
            Arm().apply(bytearray(4), 0, 286, 0, 0x1004)


class TestRefused:
    @pytest.mark.parametrize(
        ("code", "said"),
        [
            ("@x = global i64 5\ndefine ptr @f() { ret ptr @x }", r"section \.data"),
            ("@x = internal global i64 0\ndefine ptr @f() { ret ptr @x }", r"section \.bss"),
            ("@x = common global i64 0\ndefine ptr @f() { ret ptr @x }", "x is a common symbol"),
            ("@x = thread_local global i64 5\ndefine ptr @f() { ret ptr @x }", r"section \.tdata"),
            ("@x = constant ptr @f\ndefine ptr @f() { ret ptr @x }", r"section \.data\.rel\.ro"),
        ],
    )
    @pytest.mark.parametrize("triple", ["x86_64-unknown-linux-gnu", ARM])
    def test_data(self, code, said, triple):
        with pytest.raises(LinkError, match=said):
            elf_library.link(compiled(code, triple))

    def test_other_processors_and_models(self):
        with pytest.raises(LinkError, match="unknown processor"):
            elf_library.link(compiled(CODE, "riscv64-unknown-linux-gnu"))
        with pytest.raises(LinkError):
            elf_library.link(compiled(CODE, "i686-unknown-linux-gnu"))
        with pytest.raises(LinkError, match="relocation"):
            elf_library.link(
                compiled(CODE, "x86_64-unknown-linux-gnu", "static", codemodel="large")
            )

    def test_damaged_objects(self):
        """Cut off anywhere, it is refused or has not lost anything, and nothing else is raised."""
        whole = compiled(CODE, HERE)
        made = elf_library.link(whole)
        for size in range(0, len(whole), 97):
            try:
                assert elf_library.link(whole[:size]) == made
            except LinkError:
                continue
        for data in (b"", b"\x7fELF", made, bytes(1000)):
            with pytest.raises(LinkError):
                elf_library.link(data)
