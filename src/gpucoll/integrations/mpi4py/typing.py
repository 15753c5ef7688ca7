"""Types of buffers, datatypes and specifications for type checkers, under mpi4py's names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol, SupportsIndex, TypeAlias

from gpucoll.integrations.mpi4py.constants import BottomType, InPlaceType
from gpucoll.integrations.mpi4py.datatypes import Datatype


class SupportsBuffer(Protocol):
    """Has memory through the buffer protocol, which classes can declare from Python 3.12 on."""

    if sys.version_info >= (3, 12):

        def __buffer__(self, flags: int, /) -> memoryview: ...


class SupportsDLPack(Protocol):
    """Has memory through DLPack."""

    def __dlpack__(self, /, *, stream: object = None) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


class SupportsCAI(Protocol):
    """Has memory on a GPU through the CUDA array interface."""

    @property
    def __cuda_array_interface__(self) -> dict[str, object]: ...


Buffer: TypeAlias = SupportsBuffer | SupportsDLPack | SupportsCAI
Bottom: TypeAlias = BottomType | None
InPlace: TypeAlias = InPlaceType | None
Aint: TypeAlias = SupportsIndex
Count: TypeAlias = SupportsIndex
Displ: TypeAlias = SupportsIndex
Offset: TypeAlias = SupportsIndex
TypeSpec: TypeAlias = Datatype | str

_Counts: TypeAlias = Sequence[Count]
_Blocks: TypeAlias = tuple[Sequence[Count], Sequence[Displ]]
BufSpecB: TypeAlias = (
    Buffer
    | tuple[Buffer, Count]
    | tuple[Buffer, TypeSpec]
    | tuple[Buffer, Count, TypeSpec]
    | list[Any]
)
BufSpec: TypeAlias = BufSpecB | tuple[Bottom, Count, Datatype]
BufSpecV: TypeAlias = (
    Buffer
    | tuple[Buffer, _Counts | _Blocks | TypeSpec]
    | tuple[Buffer, _Counts | _Blocks, TypeSpec]
    | tuple[Buffer, _Counts, Sequence[Displ], TypeSpec]
    | tuple[Bottom, _Blocks, Datatype]
    | tuple[Bottom, _Counts, Sequence[Displ], Datatype]
    | list[Any]
)
BufSpecW: TypeAlias = (
    tuple[Buffer, Sequence[Datatype]]
    | tuple[Buffer | Bottom, _Blocks, Sequence[Datatype]]
    | tuple[Buffer | Bottom, _Counts, Sequence[Displ], Sequence[Datatype]]
    | list[Any]
)
TargetSpec: TypeAlias = (
    Displ
    | tuple[()]
    | tuple[Displ]
    | tuple[Displ, Count]
    | tuple[Displ, Count, TypeSpec]
    | list[Any]
)

__all__ = [
    *("SupportsBuffer", "SupportsDLPack", "SupportsCAI", "Buffer", "Bottom", "InPlace", "Aint"),
    *("Count", "Displ", "Offset", "TypeSpec", "BufSpec", "BufSpecB", "BufSpecV", "BufSpecW"),
    "TargetSpec",
]
