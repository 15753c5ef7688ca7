"""Derive keys from a secret: HKDF (RFC 5869) with SHA-256.

Authentication needs only HMAC-SHA256, which the standard library has. A dependency such as
``cryptography`` would bring megabytes of compiled code for the ten lines below.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

DIGEST_BYTES: Final = hashlib.sha256().digest_size
MOST_KEY_BYTES: Final = 255 * DIGEST_BYTES
"""The most that one expansion yields: its blocks are counted in one byte."""


def mac(key: bytes, data: bytes) -> bytes:
    """Return HMAC-SHA256 of `data`."""
    return hmac.digest(key, data, "sha256")


def extract(salt: bytes, secret: bytes) -> bytes:
    """Return a key of 32 bytes with the unpredictability of `secret`, different for each salt.

    The secret is the data of this HMAC, not its key. A key would be padded with zeros, so that
    secrets that differ only in zeros at their end would be the same.
    """
    return mac(salt, secret)


def expand(key: bytes, purpose: bytes, n_bytes: int) -> bytes:
    """Return `n_bytes` of keys from an extracted key, different for each purpose."""
    if not 0 < n_bytes <= MOST_KEY_BYTES:
        raise ValueError(f"{n_bytes} bytes of keys, where 1 to {MOST_KEY_BYTES} can be had")
    made = block = b""
    for number in range(1, -(-n_bytes // DIGEST_BYTES) + 1):
        block = mac(key, block + purpose + bytes([number]))
        made += block
    return made[:n_bytes]
