"""Make a shared library from one relocatable object: users' machines may lack a linker.

The input is position-independent code from LLVM: code, constants, and calls of external functions.
It has no writable or thread-local data and no constructors; an object with any of these is a
LinkError. So the dynamic linker only has to fill in the table of addresses.

The file has three segments: read-only data (tables, constants), code, and the table of addresses,
which also becomes read-only once it is filled in.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from gpucoll.kernels.cpu import elf_object
from gpucoll.kernels.cpu.elf_machines import MACHINES, Machine
from gpucoll.kernels.cpu.elf_object import LinkError, Object, Relocation, Symbol, read_object

__all__ = ["link"]

_FILE_HEADER_BYTES, _SEGMENT_BYTES, _SYMBOL_BYTES, _RELOCATION_BYTES = 64, 56, 24, 24
_SEGMENTS = 7
_JUMP_BYTES = 16
_DYNAMIC_BYTES = 16 * 10
_LOCAL, _INDIRECT_FUNCTION = 0, 10
_SECTION_KINDS = (elf_object.PROGRAM_BITS, elf_object.UNWIND_X86)


class Row(NamedTuple):
    """A section of the output file; only debuggers and profilers read sections."""

    name: str
    kind: int
    flags: int
    start: int
    size: int
    link: int = 0
    info: int = 0
    alignment: int = 8
    entry_bytes: int = 0


def link(data: bytes) -> bytes:
    """Return the shared library of an object file.

    Raises
    ------
    LinkError
        The object has something that cannot be linked here.
    """
    return _Library(read_object(data)).build()


def _up(value: int, to: int) -> int:
    return -(-value // to) * to


def _hash(name: bytes) -> int:
    """Return the hash of a name in a symbol table (System V ABI, "Hash Table")."""
    value = 0
    for byte in name:
        value = (value << 4) + byte
        value = (value ^ (value >> 24 & 0xF0)) & 0x0FFFFFFF
    return value


@dataclass
class _Tables:
    """The tables of the dynamic linker: the names, and the index by which it finds them."""

    names: list[str]

    def __post_init__(self) -> None:
        self.strings, self.places = b"\0", {}
        for name in self.names:
            self.places[name] = len(self.strings)
            self.strings += name.encode() + b"\0"
        count = len(self.names) + 1
        buckets, chains = [0] * count, [0] * count
        for number, name in enumerate(self.names, start=1):
            bucket = _hash(name.encode()) % count
            chains[number], buckets[bucket] = buckets[bucket], number
        self.hashes = struct.pack(f"<{2 + 2 * count}I", count, count, *buckets, *chains)


class _Library:
    def __init__(self, source: Object) -> None:
        if source.machine not in MACHINES:
            raise LinkError(f"unknown processor: machine number {source.machine}")
        self.source = source
        self.machine: Machine = MACHINES[source.machine]
        self.kept = {number: self._content(number) for number in range(len(source.sections))}
        self.kept = {number: held for number, held in self.kept.items() if held}
        self.relocations = [each for each in source.relocations if each.section in self.kept]
        self._check_symbols()
        self.imports = sorted({each.symbol for each in self.relocations if self._is_import(each)})
        by_table = {e.symbol for e in self.relocations if e.kind in self.machine.through_table}
        self.in_table = sorted(by_table | set(self.imports))
        called = {e.symbol for e in self.relocations if e.kind in self.machine.calls}
        self.jumped = [number for number in self.imports if number in called]
        self.exports = [
            number
            for number, symbol in enumerate(source.symbols)
            if symbol.section in self.kept and symbol.binding != _LOCAL
        ]
        named = (*self.imports, *self.exports)
        self.tables = _Tables([source.symbols[number].name for number in named])
        self.place: dict[int, int] = {}

    def _content(self, number: int) -> bytearray:
        section = self.source.sections[number]
        is_loaded = section.flags & elf_object.ALLOCATED and section.size
        if not is_loaded or section.kind == elf_object.NOTE:
            return bytearray()
        changes = section.flags & (elf_object.WRITABLE | elf_object.THREAD_LOCAL)
        if changes or section.kind not in _SECTION_KINDS:
            raise LinkError(f"section {section.name} is neither code nor constants")
        end = bytes(4) if section.name == ".eh_frame" else b""  # terminates the table
        return bytearray(section.data + end)

    def _is_import(self, relocation: Relocation) -> bool:
        return self.source.symbols[relocation.symbol].section is None

    def _check_symbols(self) -> None:
        for relocation in self.relocations:
            symbol = self.source.symbols[relocation.symbol]
            known = symbol.section is None or symbol.section in self.kept
            if (
                not known
                or symbol.kind == _INDIRECT_FUNCTION
                or not (symbol.section or symbol.name)
            ):
                raise LinkError(f"{symbol.name or 'a symbol without a name'} is not code")

    # --- layout ------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        position = _FILE_HEADER_BYTES + _SEGMENTS * _SEGMENT_BYTES
        self.dynamic_parts: dict[str, int] = {}
        n_symbols = len(self.tables.names) + 1
        for name, size in (
            ("hash", len(self.tables.hashes)),
            ("symbols", n_symbols * _SYMBOL_BYTES),
            ("strings", len(self.tables.strings)),
            ("relocations", len(self.in_table) * _RELOCATION_BYTES),
            ("frames", 12),
        ):
            self.dynamic_parts[name] = position = _up(position, 8)
            position += size
        self.constants_end = self._place_sections(position, 0)
        self.code = _up(self.constants_end, self.machine.page_bytes)
        self.jumps = _up(self._place_sections(self.code, elf_object.EXECUTABLE), _JUMP_BYTES)
        self.code_end = self.jumps + _JUMP_BYTES * len(self.jumped)
        self.dynamic = _up(self.code_end, self.machine.page_bytes)
        self.table = self.dynamic + _DYNAMIC_BYTES
        self.end = self.table + 8 * len(self.in_table)

    def _place_sections(self, position: int, executable: int) -> int:
        for number, content in self.kept.items():
            section = self.source.sections[number]
            if section.flags & elf_object.EXECUTABLE == executable:
                position = _up(position, section.alignment)
                self.place[number] = position
                position += len(content)
        return position

    def _address(self, symbol: Symbol) -> int:
        assert symbol.section is not None
        return self.place[symbol.section] + symbol.value

    def _entry(self, number: int) -> int:
        return self.table + 8 * self.in_table.index(number)

    # --- filling in --------------------------------------------------------------------------

    def _relocate(self) -> None:
        for section, offset, kind, number, addend in self.relocations:
            symbol = self.source.symbols[number]
            if kind in self.machine.through_table:
                to = self._entry(number)
            elif symbol.section is not None:
                to = self._address(symbol)
            elif kind in self.machine.calls:
                to = self.jumps + _JUMP_BYTES * self.jumped.index(number)
            else:
                raise LinkError(f"relocation {kind} of {symbol.name}, which is external")
            here = self.place[section] + offset
            self.machine.apply(self.kept[section], offset, kind, here, to + addend)

    def build(self) -> bytes:
        self._lay_out()
        self._relocate()
        image = bytearray(self.end)

        def put(start: int, content: bytes | bytearray) -> None:
            image[start : start + len(content)] = content

        for number, content in self.kept.items():
            put(self.place[number], content)
        for turn, number in enumerate(self.jumped):
            here = self.jumps + _JUMP_BYTES * turn
            put(here, self.machine.jump(here, self._entry(number)))
        put(self.dynamic_parts["hash"], self.tables.hashes)
        put(self.dynamic_parts["symbols"], self._symbol_table())
        put(self.dynamic_parts["strings"], self.tables.strings)
        put(self.dynamic_parts["relocations"], self._table_relocations())
        put(self.dynamic_parts["frames"], self._frame_header())
        put(self.dynamic, self._dynamic_section())
        put(_FILE_HEADER_BYTES, self._segment_headers())
        rows, names = self._rows()
        start = _up(self.end + len(names), 8)
        image += names + bytes(start - self.end - len(names)) + rows
        put(0, self._file_header(start, len(rows) // 64))
        return bytes(image)

    def _symbol_table(self) -> bytes:
        made = bytes(_SYMBOL_BYTES)
        numbers = {number: place for place, number in enumerate(self.kept, start=1)}
        for number in (*self.imports, *self.exports):
            symbol = self.source.symbols[number]
            name, about = self.tables.places[symbol.name], symbol.binding << 4 | symbol.kind
            where = (0, 0, 0)
            if symbol.section is not None:
                where = (numbers[symbol.section], self._address(symbol), symbol.size)
            made += struct.pack("<IBBHQQ", name, about, 0, *where)
        return made

    def _table_relocations(self) -> bytes:
        made = b""
        for number in self.in_table:
            kind, addend = self.machine.relative, 0
            if number in self.imports:
                kind = (self.imports.index(number) + 1) << 32 | self.machine.table_entry
            else:
                addend = self._address(self.source.symbols[number])
            made += struct.pack("<QQq", self._entry(number), kind, addend)
        return made

    def _frame_header(self) -> bytes:
        """Return the place of the unwinding tables, without an index: readers walk them."""
        here = self.dynamic_parts["frames"]
        for number, place in self.place.items():
            if self.source.sections[number].name == ".eh_frame":
                return struct.pack("<BBBBi", 1, 0x1B, 0xFF, 0xFF, place - here - 4) + bytes(4)
        return struct.pack("<BBBB", 1, 0xFF, 0xFF, 0xFF) + bytes(8)

    def _dynamic_section(self) -> bytes:
        parts = self.dynamic_parts
        pairs = (
            (4, parts["hash"]),
            (5, parts["strings"]),
            (6, parts["symbols"]),
            (10, len(self.tables.strings)),
            (11, _SYMBOL_BYTES),
            (7, parts["relocations"]),
            (8, len(self.in_table) * _RELOCATION_BYTES),
            (9, _RELOCATION_BYTES),
            (30, 8),  # resolve all symbols when the library is loaded
            (0, 0),
        )
        return b"".join(struct.pack("<QQ", *pair) for pair in pairs)

    def _segment_headers(self) -> bytes:
        page = self.machine.page_bytes
        whole = _up(self.end, page) - self.dynamic  # whole pages, so that they can be protected
        in_file = self.end - self.dynamic
        frames = self.dynamic_parts["frames"]
        code = self.code_end - self.code
        segments = (  # kind, permissions, place, size in the file, in memory, alignment
            (1, 4, 0, self.constants_end, self.constants_end, page),
            (1, 5, self.code, code, code, page),
            (1, 6, self.dynamic, in_file, whole, page),
            (2, 6, self.dynamic, _DYNAMIC_BYTES, _DYNAMIC_BYTES, 8),
            (0x6474E550, 4, frames, 12, 12, 4),
            (0x6474E551, 6, 0, 0, 0, 16),  # a stack that is not executable
            (0x6474E552, 4, self.dynamic, whole, whole, 1),  # read-only once it is filled in
        )
        return b"".join(
            struct.pack("<IIQQQQQQ", kind, flags, start, start, start, size, memory, alignment)
            for kind, flags, start, size, memory, alignment in segments
        )

    def _rows(self) -> tuple[bytes, bytes]:
        """Return the section headers and their names."""
        sections, parts, count = self.source.sections, self.dynamic_parts, len(self.kept)
        rows = [
            Row(
                sections[number].name,
                sections[number].kind,
                sections[number].flags & 7,
                self.place[number],
                len(content),
                alignment=sections[number].alignment,
            )
            for number, content in self.kept.items()
        ]
        symbols_bytes = (len(self.tables.names) + 1) * _SYMBOL_BYTES
        strings = len(self.tables.strings)
        rows += [
            Row(".dynsym", 11, 2, parts["symbols"], symbols_bytes, count + 2, 1, 8, _SYMBOL_BYTES),
            Row(".dynstr", 3, 2, parts["strings"], strings, alignment=1),
            Row(".dynamic", 6, 3, self.dynamic, _DYNAMIC_BYTES, count + 2, 0, 8, 16),
            Row(".got", 1, 3, self.table, 8 * len(self.in_table)),
        ]
        names = b"\0" + b"".join(row.name.encode() + b"\0" for row in rows) + b".shstrtab\0"
        rows.append(Row(".shstrtab", 3, 0, self.end, len(names), alignment=1))
        made = bytes(64)
        for row in rows:
            name, start = names.index(b"\0" + row.name.encode() + b"\0") + 1, row.start
            address = start if row.flags else 0
            made += struct.pack("<IIQQQQ", name, row.kind, row.flags, address, start, row.size)
            made += struct.pack("<IIQQ", row.link, row.info, row.alignment, row.entry_bytes)
        return made, names

    def _file_header(self, sections: int, count: int) -> bytes:
        identity = b"\x7fELF\x02\x01\x01" + bytes(9)
        about = (3, self.source.machine, 1, 0, _FILE_HEADER_BYTES, sections, 0)
        sizes = (_FILE_HEADER_BYTES, _SEGMENT_BYTES, _SEGMENTS, 64, count, count - 1)
        return struct.pack("<16sHHIQQQIHHHHHH", identity, *about, *sizes)
