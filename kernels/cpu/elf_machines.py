"""The differences between processors in ELF: relocations, and jumps through a table.

For x86-64 and arm64 this covers every relocation that LLVM emits for position-independent code in
the small code model (psABI of x86-64, 4.4; "ELF for the Arm 64-bit Architecture", 5.7). Others are
a LinkError.
"""

from __future__ import annotations

import struct
from typing import ClassVar, Protocol

from gpucoll.kernels.cpu.elf_object import LinkError

__all__ = ["MACHINES", "Machine"]


class Machine(Protocol):
    """A processor family.

    Attributes
    ----------
    name : str
    page_bytes : int
        The largest page size of its kernels.
    table_entry, relative : int
        The dynamic relocations for an entry of the address table: for the address of a symbol, or
        of a place in the library.
    through_table : frozenset of int
        Relocations that go through the address table.
    calls : frozenset of int
        Relocations of direct calls and jumps.
    """

    name: str
    page_bytes: int
    table_entry: int
    relative: int
    through_table: frozenset[int]
    calls: frozenset[int]

    def apply(self, data: bytearray, offset: int, kind: int, here: int, to: int) -> None:
        """Fill in the place at `offset`, which has the address `here`, with the address `to`."""

    def jump(self, here: int, entry: int) -> bytes:
        """Return code for address `here` that jumps to the address in a table entry."""


def _pack(data: bytearray, offset: int, form: str, value: int) -> None:
    try:
        struct.pack_into(form, data, offset, value)
    except struct.error:
        raise LinkError(f"a distance of {value} bytes does not fit into its place") from None


class X86:
    """x86-64."""

    name = "x86_64"
    page_bytes = 0x1000
    table_entry = 6  # R_X86_64_GLOB_DAT
    relative = 8
    through_table = frozenset({9, 41, 42})  # GOTPCREL, GOTPCRELX, REX_GOTPCRELX
    calls = frozenset({4})  # PLT32
    _near = frozenset({2, *calls, *through_table})  # PC32
    _far = 24  # PC64

    def apply(self, data: bytearray, offset: int, kind: int, here: int, to: int) -> None:
        """See `Machine`."""
        if kind in self._near:
            _pack(data, offset, "<i", to - here)
        elif kind == self._far:
            _pack(data, offset, "<q", to - here)
        else:
            raise LinkError(f"relocation {kind} of {self.name} is unknown")

    def jump(self, here: int, entry: int) -> bytes:
        """See `Machine`."""
        return b"\xff\x25" + struct.pack("<i", entry - here - 6) + b"\xcc" * 10


class Arm:
    """arm64, also called AArch64."""

    name = "aarch64"
    page_bytes = 0x10000
    table_entry = 1025  # R_AARCH64_GLOB_DAT
    relative = 1027
    through_table = frozenset({311, 312})  # ADR_GOT_PAGE, LD64_GOT_LO12_NC
    calls = frozenset({282, 283})  # JUMP26, CALL26
    _pages = frozenset({275, 311})  # ADR_PREL_PG_HI21, ADR_GOT_PAGE
    _low_bits: ClassVar = {277: 0, 278: 0, 284: 1, 285: 2, 286: 3, 299: 4, 312: 3}
    """ADD_ABS_LO12_NC, then loads and stores of 1 to 16 bytes: the shift of their offset."""

    def apply(self, data: bytearray, offset: int, kind: int, here: int, to: int) -> None:
        """See `Machine`."""
        if kind == 261:  # PREL32
            _pack(data, offset, "<i", to - here)
            return
        if kind == 260:  # PREL64
            _pack(data, offset, "<q", to - here)
            return
        (word,) = struct.unpack_from("<I", data, offset)
        if kind in self._pages:
            pages = self._within((to >> 12) - (here >> 12), 21)
            word |= (pages & 3) << 29 | ((pages >> 2) & 0x7FFFF) << 5
        elif kind == 274:  # ADR_PREL_LO21
            distance = self._within(to - here, 21)
            word |= (distance & 3) << 29 | ((distance >> 2) & 0x7FFFF) << 5
        elif kind in self._low_bits:
            low, shift = to & 0xFFF, self._low_bits[kind]
            if low & ((1 << shift) - 1):
                raise LinkError(f"address {to:#x} is not a multiple of {1 << shift}")
            word |= (low >> shift) << 10
        elif kind in self.calls:
            word |= self._within((to - here) >> 2, 26) & 0x3FFFFFF
        else:
            raise LinkError(f"relocation {kind} of {self.name} is unknown")
        _pack(data, offset, "<I", word)

    def jump(self, here: int, entry: int) -> bytes:
        """See `Machine`."""
        code = bytearray(struct.pack("<4I", 0x90000010, 0xF9400211, 0xD61F0220, 0xD503201F))
        self.apply(code, 0, 275, here, entry)  # adrp x16, page of the entry
        self.apply(code, 4, 286, here + 4, entry)  # ldr x17, [x16, rest]; br x17; nop
        return bytes(code)

    def _within(self, value: int, bits: int) -> int:
        if not -(1 << (bits - 1)) <= value < 1 << (bits - 1):
            raise LinkError(f"a distance of {value} does not fit into {bits} bits")
        return value


MACHINES: dict[int, Machine] = {62: X86(), 183: Arm()}
"""By the number in an object's header."""
