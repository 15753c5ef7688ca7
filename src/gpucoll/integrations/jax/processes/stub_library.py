"""Write a shared library of functions that jump through a table, and of constants, as an ELF file.

jaxlib loads its MPI from a library that it finds by name. This one has the names and nothing
behind them: each function jumps to the address in its slot of the table `SLOTS`, which Python
fills after the library is loaded. A function whose slot is empty returns `NOT_FILLED`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["MACHINES", "NOT_FILLED", "SLOTS", "write"]

SLOTS = "gpucoll_slots"
NOT_FILLED = 16
"""What a function without a slot returns. It is no code of success."""

_STUB_BYTES = 24
_PAGE_BYTES = 0x10000  # the largest page of the processors below
_SYMBOL_BYTES = 24
_FUNCTION, _OBJECT = 2, 1
_CODE_SECTION, _DATA_SECTION = 1, 2  # any number that is not 0: there are no section headers


class Machine(NamedTuple):
    """A processor family."""

    number: int
    """Its number in the header of an ELF file."""
    begins: bytes
    """The instructions before the distance to the slot, which is relative to `distance_from`."""
    distance_from: int
    ends: bytes

    def stub(self, here: int, slot: int) -> bytes:
        """Return a function at `here` that jumps to what `slot` holds, if it holds anything."""
        distance = slot - here - self.distance_from
        if self.number == _ARM:  # ldr x16, slot
            middle = struct.pack("<I", 0x58000010 | (distance >> 2 & 0x7FFFF) << 5)
        else:
            middle = struct.pack("<i", distance)
        return (self.begins + middle + self.ends).ljust(_STUB_BYTES, b"\0")


_X86, _ARM = 62, 183
MACHINES = {
    "x86_64": Machine(
        _X86,
        bytes.fromhex("f30f1efa 488b05"),  # endbr64; mov rax, [rip + distance]
        11,
        # test rax, rax; je 1f; jmp rax; 1: mov eax, NOT_FILLED; ret
        bytes.fromhex("4885c0 7402 ffe0 b810000000 c3"),
    ),
    "aarch64": Machine(
        _ARM,
        struct.pack("<I", 0xD503245F),  # bti c
        4,
        # cbz x16, 1f; br x16; 1: mov w0, NOT_FILLED; ret
        struct.pack("<4I", 0xB4000050, 0xD61F0200, 0x52800200, 0xD65F03C0),
    ),
}
"""By the name that `platform.machine` gives."""


def write(
    machine: Machine, functions: Sequence[str], words: Mapping[str, int], ints: Mapping[str, int]
) -> bytes:
    """Return the library.

    Parameters
    ----------
    machine : Machine
        The processor family that runs it.
    functions : sequence of str
        The functions' names; the table's slots are in this order.
    words, ints : mapping
        Names and values of constants of 8 and of 4 bytes.
    """
    names = [*functions, *words, *ints, SLOTS]
    strings, places = b"\0", {}
    for name in names:
        places[name] = len(strings)
        strings += name.encode() + b"\0"
    n_symbols = len(names) + 1
    hashes = _hash_table(names)

    symbols_at = _up(64 + 4 * 56, 8)
    strings_at = symbols_at + _SYMBOL_BYTES * n_symbols
    hashes_at = _up(strings_at + len(strings), 8)
    code_at = _up(hashes_at + len(hashes), 64)
    code_end = code_at + _STUB_BYTES * len(functions)
    slots_at = _up(code_end, _PAGE_BYTES)
    words_at = slots_at + 8 * len(functions)
    ints_at = words_at + 8 * len(words)
    dynamic_at = _up(ints_at + 4 * len(ints), 16)
    dynamic = struct.pack(
        "<12Q",
        4,
        hashes_at,
        5,
        strings_at,
        6,
        symbols_at,
        10,
        len(strings),
        11,
        _SYMBOL_BYTES,
        0,
        0,
    )
    end = dynamic_at + len(dynamic)

    rows = [("", 0, 0, 0, 0)]
    rows += [
        (name, code_at + _STUB_BYTES * turn, _STUB_BYTES, _FUNCTION, _CODE_SECTION)
        for turn, name in enumerate(functions)
    ]
    rows += [(n, words_at + 8 * turn, 8, _OBJECT, _DATA_SECTION) for turn, n in enumerate(words)]
    rows += [(n, ints_at + 4 * turn, 4, _OBJECT, _DATA_SECTION) for turn, n in enumerate(ints)]
    rows.append((SLOTS, slots_at, 8 * len(functions), _OBJECT, _DATA_SECTION))
    symbols = b"".join(
        struct.pack(
            "<IBBHQQ", places.get(name, 0), (1 << 4 | kind) if name else 0, 0, section, at, size
        )
        for name, at, size, kind, section in rows
    )
    code = b"".join(
        machine.stub(code_at + _STUB_BYTES * turn, slots_at + 8 * turn)
        for turn in range(len(functions))
    )
    segments = (  # kind, permissions, place, size, alignment
        (1, 5, 0, code_end, _PAGE_BYTES),
        (1, 6, slots_at, end - slots_at, _PAGE_BYTES),
        (2, 6, dynamic_at, len(dynamic), 8),
        (0x6474E551, 6, 0, 0, 16),  # a stack that is not executable
    )
    image = bytearray(end)
    for at, content in (
        (0, _file_header(machine)),
        (64, b"".join(_segment_header(*segment) for segment in segments)),
        (symbols_at, symbols),
        (strings_at, strings),
        (hashes_at, hashes),
        (code_at, code),
        (words_at, struct.pack(f"<{len(words)}Q", *words.values())),
        (ints_at, struct.pack(f"<{len(ints)}i", *ints.values())),
        (dynamic_at, dynamic),
    ):
        image[at : at + len(content)] = content
    return bytes(image)


def _up(value: int, to: int) -> int:
    return -(-value // to) * to


def _hash_table(names: Sequence[str]) -> bytes:
    """Return the index by which the dynamic linker finds a name (System V ABI, "Hash Table")."""
    count = len(names) + 1
    buckets, chains = [0] * count, [0] * count
    for number, name in enumerate(names, start=1):
        value = 0
        for byte in name.encode():
            value = (value << 4) + byte
            value = (value ^ (value >> 24 & 0xF0)) & 0x0FFFFFFF
        chains[number], buckets[value % count] = buckets[value % count], number
    return struct.pack(f"<{2 + 2 * count}I", count, count, *buckets, *chains)


def _segment_header(kind: int, flags: int, at: int, size: int, alignment: int) -> bytes:
    return struct.pack("<IIQQQQQQ", kind, flags, at, at, at, size, size, alignment)


def _file_header(machine: Machine) -> bytes:
    identity = b"\x7fELF\x02\x01\x01" + bytes(9)
    about = (3, machine.number, 1, 0, 64, 0, 0, 64, 56, 4, 64, 0, 0)
    return struct.pack("<16sHHIQQQIHHHHHH", identity, *about)
