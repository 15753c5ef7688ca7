"""The secret that all ranks of a job over TCP share, and the keys that are derived from it.

HKDF (RFC 5869) with SHA-256 derives them. Authentication needs only HMAC-SHA256, which the standard
library has. A dependency such as ``cryptography`` would bring megabytes of compiled code for a few
lines.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from typing import Final

from gpucoll import config
from gpucoll.errors import ArgumentError, AuthenticationError

LEAST_SECRET_BYTES: Final = 16
"""Minimum length of a secret.

An attacker who sees a handshake can try guesses as fast as a computer can: 128 random bits are
safe, and no word, name or date is as long.
"""
MOST_SECRET_BYTES: Final = 4096
"""A larger file is not a secret but some other file."""
_OTHERS: Final = stat.S_IRGRP | stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH
_HOW_TO_MAKE_ONE: Final = 'python -c "import secrets; print(secrets.token_hex(32))"'
_BOTH: Final = f"{config.SECRET} or {config.SECRET_FILE}"


def job_secret() -> bytes | None:
    """Return the job's secret from the environment; None: it has none.

    An empty variable counts as not set.

    Raises
    ------
    ArgumentError
        Both variables are set, the file cannot be used, or the secret is too short.
    """
    given, path = config.variable(config.SECRET), config.variable(config.SECRET_FILE)
    if given and path:
        raise ArgumentError(
            f"both {config.SECRET} and {config.SECRET_FILE} are set: unset one of them, so that "
            "it is plain which secret the job has"
        )
    if given:
        return check_secret(os.fsencode(given), config.SECRET)
    if path:
        return check_secret(_read(path), f"the file {path} ({config.SECRET_FILE})")
    return None


def check_secret(secret: bytes, where: str) -> bytes:
    """Return the secret, or raise ArgumentError if it is too short or too long.

    Parameters
    ----------
    secret : bytes
        The secret; it is never shown.
    where : str
        Where the secret comes from; the message begins with it.
    """
    if len(secret) < LEAST_SECRET_BYTES:
        raise ArgumentError(
            f"{where} holds a secret of {len(secret)} bytes, but at least {LEAST_SECRET_BYTES} are "
            "needed: a shorter one could be guessed. Make one for all ranks of the job with "
            f"{_HOW_TO_MAKE_ONE}"
        )
    if len(secret) > MOST_SECRET_BYTES:
        raise ArgumentError(
            f"{where} holds more than the {MOST_SECRET_BYTES} bytes that a secret may have. "
            f"Make one for all ranks of the job with {_HOW_TO_MAKE_ONE}"
        )
    return secret


def missing_secret_error(who: str) -> AuthenticationError:
    """Return the error for a job over TCP that has no secret.

    Parameters
    ----------
    who : str
        The rank that needs it, such as "rank 1 of 4"; the message begins with it.
    """
    return AuthenticationError(
        f"{who} must talk to other hosts over TCP, and no secret is set; without one, anybody who "
        f"reaches the port could take part. Make one with {_HOW_TO_MAKE_ONE}, and give the same to "
        f"every rank of the job: in the variable {config.SECRET}, or in a file of mode 600 that "
        f"{config.SECRET_FILE} names"
    )


def _read(path: str) -> bytes:
    """Return the file's content, without the end of its line; raise if others can read the file."""
    where = f"{config.SECRET_FILE}={path}"
    try:
        # So that a pipe cannot block this, nor a terminal become the controlling one.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ArgumentError(f"{where} cannot be opened: {why}") from None
    try:
        _check_file(os.fstat(fd), path)
        held = os.read(fd, MOST_SECRET_BYTES + 3)  # one byte too many, and the end of a line
    except OSError as error:
        raise ArgumentError(f"{where} cannot be read: {error.strerror}") from None
    finally:
        os.close(fd)
    return held.removesuffix(b"\n").removesuffix(b"\r")


def _check_file(status: os.stat_result, path: str) -> None:
    """Raise ArgumentError unless this user or root alone can read and write the open file."""
    where = f"{config.SECRET_FILE}={path}"
    if not stat.S_ISREG(status.st_mode):
        raise ArgumentError(f"{where} is no regular file")
    if status.st_uid not in (0, os.geteuid()):
        raise ArgumentError(
            f"{where} belongs to user {status.st_uid}, who knows the secret then and can replace "
            f"it: it must be a file of root or of user {os.geteuid()}, who runs this rank"
        )
    if status.st_mode & _OTHERS:
        raise ArgumentError(
            f"{where} is open to others than its owner (mode {stat.S_IMODE(status.st_mode):o}), so "
            f"it holds no secret. Close it: chmod 600 {path}; and make another "
            f"secret if somebody may have read this one: {_HOW_TO_MAKE_ONE}"
        )


# --- keys from a secret ---------------------------------------------------------------------------


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
