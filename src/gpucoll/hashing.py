"""BLAKE2b without the rest of hashlib, which loads OpenSSL: 4 ms and 3 MiB in every process."""

from __future__ import annotations

try:
    from _blake2 import blake2b
except ImportError:  # not part of the language, so another Python may lack it
    from hashlib import blake2b

__all__ = ["blake2b"]
