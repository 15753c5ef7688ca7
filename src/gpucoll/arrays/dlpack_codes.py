"""The numbers by which DLPack names dtypes. Source: include/dlpack/dlpack.h, version 1.1."""

from __future__ import annotations

__all__ = ["CODES", "KINDS", "NAMES"]

KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
"""DLDataTypeCode -> the start of a dtype's name, which ends in its bits."""
NAMES = {6: "bool", 10: "float8_e4m3fn", 12: "float8_e5m2"}
"""DLDataTypeCode -> the whole name of a dtype of 8 bits."""

CODES = {
    **{
        f"{kind}{bits}": (code, bits)
        for code, kind in KINDS.items()
        for bits in (8, 16, 32, 64, 128)
    },
    **{name: (code, 8) for code, name in NAMES.items()},
}
"""Name of a dtype -> its code and bits in DLPack."""
