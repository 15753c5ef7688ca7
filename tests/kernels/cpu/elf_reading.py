"""Shared libraries in tests: loaded, or their files read as a dynamic linker reads them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gpucoll.kernels.cpu import library

HASH, STRINGS, SYMBOLS, RELOCATIONS, RELOCATIONS_BYTES = 4, 5, 6, 7, 8


class Loaded:
    """A library that must load, and have what it is asked for."""

    def __init__(self, path: Path) -> None:
        made = library.load(path)
        assert made is not None
        self._library = made

    def address(self, name: str) -> int:
        found = self._library.address(name)
        assert found is not None
        return found

    def function(self, name: str, returns: Any, *arguments: Any) -> Any:
        return ctypes.CFUNCTYPE(returns, *arguments)(self.address(name))


class Imported(NamedTuple):
    """What a dynamic relocation asks for: a name, or a place in the library."""

    place: int
    kind: int
    name: str
    addend: int


class ReadLibrary:
    """What the dynamic linker finds in a library that was not loaded: addresses are offsets."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        (start,) = struct.unpack_from("<Q", data, 32)
        count = struct.unpack_from("<H", data, 56)[0]
        self.segments = [
            struct.unpack_from("<IIQQQQQQ", data, start + 56 * n) for n in range(count)
        ]
        (dynamic,) = (segment for segment in self.segments if segment[0] == 2)
        rows = struct.iter_unpack("<QQ", data[dynamic[2] : dynamic[2] + dynamic[5]])
        self.dynamic: dict[int, int] = {tag: value for tag, value in rows if tag}

    def _name(self, number: int) -> str:
        (name,) = struct.unpack_from("<I", self.data, self.dynamic[SYMBOLS] + 24 * number)
        start = self.dynamic[STRINGS] + name
        return self.data[start : self.data.index(b"\0", start)].decode()

    def find(self, name: str) -> int:
        """Return the address of a symbol, by its hash; 0 where there is none."""
        value = 0
        for byte in name.encode():
            value = (value << 4) + byte
            value = (value ^ (value & 0xF0000000) >> 24) & 0x0FFFFFFF
        n_buckets, _ = struct.unpack_from("<II", self.data, self.dynamic[HASH])
        (number,) = self._word(2 + value % n_buckets)
        while number and self._name(number) != name:
            (number,) = self._word(2 + n_buckets + number)
        return int(struct.unpack_from("<Q", self.data, self.dynamic[SYMBOLS] + 24 * number + 8)[0])

    def _word(self, place: int) -> tuple[int]:
        return struct.unpack_from("<I", self.data, self.dynamic[HASH] + 4 * place)

    def imports(self) -> Iterator[Imported]:
        """Return what the table of addresses is filled in with."""
        start, size = self.dynamic[RELOCATIONS], self.dynamic[RELOCATIONS_BYTES]
        for place, about, addend in struct.iter_unpack("<QQq", self.data[start : start + size]):
            yield Imported(place, about & 0xFFFFFFFF, self._name(about >> 32), addend)


def pair_target(first: int, second: int, here: int) -> int:
    """Return the address that arm64's ``adrp`` at `here`, and what uses its result, lead to."""
    assert first & 0x9F000000 == 0x90000000
    pages = (first >> 5 & 0x7FFFF) << 2 | first >> 29 & 3
    pages -= (pages & 1 << 20) << 1
    if second & 0xFF800000 == 0x91000000:  # add
        low = second >> 10 & 0xFFF
    else:  # a load, of 16 bytes where opc says so
        assert second & 0x3B000000 == 0x39000000
        is_wide = second >> 26 & 1 and second >> 23 & 1
        low = (second >> 10 & 0xFFF) << (4 if is_wide else second >> 30)
    return (here >> 12 << 12) + (pages << 12) + low
