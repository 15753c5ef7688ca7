"""What clients and the server of a secure sum read and compute alike."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpucoll.errors import SecureSumError
from gpucoll.federated.secure_sum import keys, shamir

if TYPE_CHECKING:
    from gpucoll.federated.secure_sum.protocol import SecureSum

ADVERT_BYTES = 3 * keys.KEY_BYTES + keys.SIGNATURE_BYTES
TWO_SHARES_BYTES = 2 * shamir.SHARE_BYTES
SEALED_BYTES = keys.NONCE_BYTES + TWO_SHARES_BYTES + keys.SEAL_BYTES


@dataclass(frozen=True)
class Advert:
    """The public keys of a client."""

    verify_key: bytes
    sealing_key: bytes
    mask_key: bytes

    def signed(self, settings: SecureSum, client: int, signing_key: bytes) -> bytes:
        """Return the advert as bytes, with its signature."""
        return self._bytes() + keys.sign(signing_key, self._text(settings, client))

    @staticmethod
    def read(settings: SecureSum, client: int, record: bytes) -> Advert:
        """Return the advert that bytes hold; SecureSumError unless the client signed it."""
        size = keys.KEY_BYTES
        advert = Advert(record[:size], record[size : 2 * size], record[2 * size : 3 * size])
        known = settings.verify_keys
        if known is not None and advert.verify_key != known[client]:
            raise SecureSumError(
                f"client {client} is said to have another key than verify_keys has"
            )
        text, signature = advert._text(settings, client), record[3 * size :]
        if not keys.is_signed(advert.verify_key, text, signature):
            raise SecureSumError(f"the keys of client {client} are not signed by its key")
        return advert

    def _bytes(self) -> bytes:
        return self.verify_key + self.sealing_key + self.mask_key

    def _text(self, settings: SecureSum, client: int) -> bytes:
        return b"keys" + settings.tag + struct.pack("<H", client) + self._bytes()


def confirmed_text(settings: SecureSum, keys_body: bytes, shared: bytes, survivors: bytes) -> bytes:
    """Return what a client signs: the keys, who shared them, whose vectors are in the sum."""
    return b"left" + settings.digest + hashlib.sha256(keys_body).digest() + shared + survivors


def sealing_key(
    settings: SecureSum, private: bytes, public: bytes, sender: int, receiver: int
) -> bytes:
    """Return the key that encrypts one client's shares for another."""
    info = b"shares" + struct.pack("<HH", sender, receiver)
    return keys.derive(keys.shared_secret(private, public), info, settings.tag)


def pair_mask(settings: SecureSum, private: bytes, public: bytes, a: int, b: int) -> bytes:
    """Return the key of the mask that two clients have in common; the lower one adds it."""
    info = b"pair mask" + struct.pack("<HH", min(a, b), max(a, b))
    return keys.derive(keys.shared_secret(private, public), info, settings.tag)


def own_mask(settings: SecureSum, seed: bytes, client: int) -> bytes:
    """Return the key of a client's own mask."""
    return keys.derive(seed, b"own mask" + struct.pack("<H", client), settings.tag)


def commitment(settings: SecureSum, seed: bytes, client: int) -> bytes:
    """Return the digest of a client's seed, by which a wrong share of it is noticed."""
    return keys.derive(seed, b"commitment" + struct.pack("<H", client), settings.tag)


def kept_shares(settings: SecureSum, shared: Collection[int], client: int) -> list[int]:
    """Return the clients of which a client holds shares, in order."""
    members = frozenset(shared)
    return [other for other in settings.holders(client) if other in members]


def point(client: int) -> int:
    """Return where the polynomials are evaluated for a client."""
    return client + 1
