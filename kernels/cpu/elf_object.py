"""Read a relocatable ELF object, as LLVM emits it, into sections, symbols and relocations.

Reads only what a linker of such objects needs: 64 bits, little-endian, relocations with addends. A
truncated or inconsistent object is a LinkError.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["LinkError", "Object", "Relocation", "Section", "Symbol", "read_object"]

ALLOCATED, EXECUTABLE, WRITABLE, THREAD_LOCAL = 0x2, 0x4, 0x1, 0x400
PROGRAM_BITS, SYMBOL_TABLE, RELOCATIONS, NOTE, NO_BITS = 1, 2, 4, 7, 8
UNWIND_X86 = 0x70000001
_RELOCATABLE = 1
_SPECIAL = 0xFF00  # section numbers from here on are special values
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")


class LinkError(ValueError):
    """An object that cannot be linked here. The message tells which content prevents it."""


class Section(NamedTuple):
    """A section; its data is empty if the file contains none."""

    name: str
    kind: int
    flags: int
    data: bytes
    size: int
    alignment: int


class Symbol(NamedTuple):
    """A symbol; `section` is None for a symbol that is defined elsewhere."""

    name: str
    binding: int
    kind: int
    section: int | None
    value: int
    size: int


class Relocation(NamedTuple):
    """A place in a section that gets the address of a symbol."""

    section: int
    offset: int
    kind: int
    symbol: int
    addend: int


@dataclass(frozen=True)
class Object:
    """The content of an object file."""

    machine: int
    sections: list[Section]
    symbols: list[Symbol]
    relocations: list[Relocation]

    def needed(self) -> set[str]:
        """Return the names that are used here and defined elsewhere."""
        used = {self.symbols[each.symbol] for each in self.relocations}
        return {symbol.name for symbol in used if symbol.section is None}


def read_object(data: bytes) -> Object:
    """Read an object file; LinkError for anything else."""
    try:
        return _read(data)
    except (struct.error, IndexError, ValueError) as error:
        if isinstance(error, LinkError):
            raise
        raise LinkError(f"the object is damaged: {error}") from None


def _read(data: bytes) -> Object:
    identity, kind, machine, *_, start, _, _, _, _, size, count, names = _HEADER.unpack_from(data)
    if identity[:6] != b"\x7fELF\x02\x01" or kind != _RELOCATABLE or size != _SECTION.size:
        raise LinkError("not a relocatable little-endian ELF object of 64 bits")
    headers = [_SECTION.unpack_from(data, start + place * size) for place in range(count)]
    titles = headers[names][4]
    sections = [_section(data, header, titles) for header in headers]
    symbols: list[Symbol] = []
    relocations: list[Relocation] = []
    for header, section in zip(headers, sections, strict=True):
        if section.kind == SYMBOL_TABLE:
            symbols = _symbols(section.data, data, headers[header[6]][4])
    for header, section in zip(headers, sections, strict=True):
        if section.kind == RELOCATIONS:
            relocations += _relocations(section.data, header[7])
    if any(each.symbol >= len(symbols) for each in relocations):
        raise LinkError("the object is damaged: a relocation refers to a missing symbol")
    return Object(machine, sections, symbols, relocations)


def _section(data: bytes, header: tuple[int, ...], titles: int) -> Section:
    name, kind, flags, _, offset, size, _, _, alignment, _ = header
    held = b"" if kind == NO_BITS else data[offset : offset + size]
    if kind not in (0, NO_BITS) and len(held) != size:
        raise LinkError("the object is damaged: a section ends after the end of the file")
    return Section(_text(data, titles + name), kind, flags, held, size, max(alignment, 1))


def _symbols(table: bytes, data: bytes, strings: int) -> list[Symbol]:
    made = []
    for name, about, _, section, value, size in _SYMBOL.iter_unpack(table):
        if section == 0xFFF2:
            raise LinkError(f"{_text(data, strings + name)} is a common symbol")
        where = None if section == 0 or section >= _SPECIAL else section
        text = _text(data, strings + name)
        made.append(Symbol(text, about >> 4, about & 15, where, value, size))
    return made


def _relocations(table: bytes, section: int) -> list[Relocation]:
    return [
        Relocation(section, offset, about & 0xFFFFFFFF, about >> 32, addend)
        for offset, about, addend in _RELOCATION.iter_unpack(table)
    ]


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()
