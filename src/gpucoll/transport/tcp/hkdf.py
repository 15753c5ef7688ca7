"""Keys from a secret: HKDF (RFC 5869) with SHA-256.

All of authentication is HMAC-SHA256, which the standard library has: a dependency such as
``cryptography`` would bring megabytes of compiled code for the ten lines below.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

DIGEST_BYTES: Final = hashlib.sha256().digest_size
MOST_KEY_BYTES: Final = 255 * DIGEST_BYTES
"""What one expansion yields at most: its blocks are counted in a byte."""


def mac(key: bytes, data: bytes) -> bytes:
    """Return HMAC-SHA256 of `data`."""
    return hmac.digest(key, data, "sha256")


def extract(salt: bytes, secret: bytes) -> bytes:
    """Return a key of 32 bytes that holds what is unpredictable in `secret`, other for each salt.

    The secret is the data of this HMAC and not its key, which would be padded with zeros: secrets
    that differ in a zero at their end would be one and the same.
    """
    return mac(salt, secret)


def expand(key: bytes, purpose: bytes, n_bytes: int) -> bytes:
    """Return `n_bytes` of keys made of an extracted one, others for each purpose."""
    if not 0 < n_bytes <= MOST_KEY_BYTES:
        raise ValueError(f"{n_bytes} bytes of keys, where 1 to {MOST_KEY_BYTES} can be had")
    made = block = b""
    for number in range(1, -(-n_bytes // DIGEST_BYTES) + 1):
        block = mac(key, block + purpose + bytes([number]))
        made += block
    return made[:n_bytes]
