"""The cryptographic functions of a secure sum, all of them from the package cryptography.

They work on raw bytes: private and public keys of X25519 and Ed25519 are 32 bytes.
"""

from __future__ import annotations

from gpucoll.errors import BackendUnavailableError, SecureSumError

try:
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as error:
    raise BackendUnavailableError(
        "a secure sum needs the package cryptography: pip install 'gpucoll[federated]'"
    ) from error

KEY_BYTES = 32
SIGNATURE_BYTES = 64
NONCE_BYTES = 12
SEAL_BYTES = 16  # by which a sealed text is longer


def public_key(private: bytes) -> bytes:
    """Return the X25519 public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def shared_secret(private: bytes, public: bytes) -> bytes:
    """Return what X25519 makes of a private key and another party's public key (RFC 7748)."""
    try:
        other = X25519PublicKey.from_public_bytes(public)
        return X25519PrivateKey.from_private_bytes(private).exchange(other)
    except ValueError as error:  # a point of low order, with which the secret would be zero
        raise SecureSumError(f"a public key of X25519 is invalid ({error})") from None


def derive(secret: bytes, info: bytes, salt: bytes | None = None, length: int = KEY_BYTES) -> bytes:
    """Return a key that HKDF-SHA256 derives from a secret (RFC 5869)."""
    return HKDF(hashes.SHA256(), length, salt, info).derive(secret)


def seal(key: bytes, text: bytes, bound: bytes, nonce: bytes) -> bytes:
    """Encrypt a text with ChaCha20-Poly1305, bound to the bytes `bound` (RFC 8439)."""
    return ChaCha20Poly1305(key).encrypt(nonce, text, bound)


def unseal(key: bytes, sealed: bytes, bound: bytes, nonce: bytes) -> bytes:
    """Return the text that `seal` encrypted; SecureSumError if anything of it was changed."""
    try:
        return ChaCha20Poly1305(key).decrypt(nonce, sealed, bound)
    except InvalidTag:
        raise SecureSumError("an encrypted share was changed, or is not for this client") from None


def key_stream(key: bytes, block: int = 0) -> CipherContext:
    """Return a ChaCha20 encryptor at a block of 64 bytes of a key's stream (RFC 8439).

    The nonce is 0: each key is used for one stream.
    """
    counter_and_nonce = block.to_bytes(4, "little") + bytes(NONCE_BYTES)
    return Cipher(algorithms.ChaCha20(key, counter_and_nonce), None).encryptor()


def verify_key(signing_key: bytes) -> bytes:
    """Return the Ed25519 public key of a private one."""
    return Ed25519PrivateKey.from_private_bytes(signing_key).public_key().public_bytes_raw()


def sign(signing_key: bytes, text: bytes) -> bytes:
    """Return the Ed25519 signature of a text."""
    return Ed25519PrivateKey.from_private_bytes(signing_key).sign(text)


def is_signed(verify_key: bytes, text: bytes, signature: bytes) -> bool:
    """Return whether a signature of a text is that of a key."""
    try:
        Ed25519PublicKey.from_public_bytes(verify_key).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True
