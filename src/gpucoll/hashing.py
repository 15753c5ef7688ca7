"""BLAKE2b, without the rest of hashlib: that loads OpenSSL, for 4 ms and 3 MiB of every process."""

from __future__ import annotations

try:
    from _blake2 import blake2b
except ImportError:  # no part of the language: it may be called otherwise in another Python
    from hashlib import blake2b

__all__ = ["blake2b"]
