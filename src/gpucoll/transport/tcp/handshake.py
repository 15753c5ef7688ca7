"""Authenticate both ends of a TCP connection: each proves that it knows the job's secret.

This module takes and returns bytes, and uses no socket. The messages, in the order in which they
are sent::

    both      hello: magic, version, role, a fresh nonce
    connects  proof                   when the other end's hello has come
    accepts   proof                   when the connecting end's proof was found valid

The accepting end proves nothing to an end that has proved nothing. So a stranger gets only random
bytes from it, and nothing derived from the secret on which to test guesses. The connecting end
sends nothing further before it has found the other end's proof valid. A proof is two MACs over both
hellos and the role of the end that proves; the second one also covers the connection's purpose. So
an end's own proof that is sent back is not valid, nor is a proof of another connection, and a wrong
secret can be told from a connection for another purpose.
"""

from __future__ import annotations

import enum
import hmac
import secrets
import struct
from typing import Final

from gpucoll import config
from gpucoll.errors import AuthenticationError, StateError
from gpucoll.transport.tcp.one_sided_tls import spoke_tls
from gpucoll.transport.tcp.secret import DIGEST_BYTES, check_secret, expand, extract, mac

MAGIC: Final = b"gpucoll\0"
PROTOCOL_VERSION: Final = 1
"""Version of everything on a connection, hellos and frames; raised with any change to either."""
NONCE_BYTES: Final = 32
KEY_BYTES: Final = 32
_HEAD: Final = struct.Struct(f">{len(MAGIC)}sHB")  # magic, version, role
_LENGTH: Final = struct.Struct(">Q")
HELLO_BYTES: Final = _HEAD.size + NONCE_BYTES
PROOF_BYTES: Final = 2 * DIGEST_BYTES
HANDSHAKE_BYTES: Final = HELLO_BYTES + PROOF_BYTES
"""What either end sends in all; an end that has proved nothing makes the other store no more."""

_SECRETS: Final = f"{config.SECRET} or {config.SECRET_FILE} must give every rank the same secret"


class ClosedEarlyError(AuthenticationError):
    """The other end closed the connection before it was authenticated."""


class Role(enum.Enum):
    """Which end of a connection this is."""

    CONNECTS = 1
    ACCEPTS = 2

    @property
    def other(self) -> Role:
        return Role.ACCEPTS if self is Role.CONNECTS else Role.CONNECTS


def encode_purpose(*parts: str | int | bytes) -> bytes:
    """Return a connection's purpose as bytes, different for any two different lists of parts."""
    encoded = []
    for part in parts:
        if isinstance(part, bytes):
            kind, data = b"b", part
        else:
            kind = b"s" if isinstance(part, str) else b"i"
            data = str(part).encode("utf-8", "surrogatepass")
        encoded += [kind, _LENGTH.pack(len(data)), data]
    return b"".join(encoded)


class Handshake:
    """One end of the handshake on a new connection.

    The caller sends what `start` returns, gives received bytes to `take` and sends what that
    returns, until `is_done`. A caller that receives at most `n_wanted` bytes each time leaves the
    bytes after the handshake in the socket; otherwise they are in `rest`. The caller limits the
    time.

    Parameters
    ----------
    secret : bytes
        The job's secret, of at least 16 bytes.
    role : Role
        Which end this is.
    purpose : bytes
        The purpose that this end assumes for the connection (job, epoch, kind of link, ranks), by
        `encode_purpose`. It is not sent; if the other end's purpose differs, its proof is invalid.
        Facts that the accepting end cannot know yet, such as the rank that connects, belong into
        the first sealed frame instead.

    Raises
    ------
    ArgumentError
        The secret is too short.
    """

    def __init__(self, secret: bytes, role: Role, purpose: bytes) -> None:
        self._secret = check_secret(secret, "the argument secret")
        self._role = role
        self._purpose = purpose
        self._hello = _hello(role, secrets.token_bytes(NONCE_BYTES))
        self._other_hello = b""
        self._proofs: dict[Role, bytes] = {}
        self._keys: dict[Role, bytes] = {}
        self._held = bytearray()
        self._failure = ""
        self._is_done = False

    @property
    def is_done(self) -> bool:
        """Whether the other end has proved that it knows the secret, and all is returned."""
        return self._is_done

    @property
    def n_wanted(self) -> int:
        """The most bytes to receive next; 0 once `is_done`."""
        if self._is_done or self._failure:
            return 0
        return (PROOF_BYTES if self._other_hello else HELLO_BYTES) - len(self._held)

    @property
    def rest(self) -> bytes:
        """The bytes received after the handshake: the first ones of the next layer."""
        return bytes(self._held) if self._is_done else b""

    @property
    def send_key(self) -> bytes:
        """The key for data that this end sends, new on each connection."""
        return self._key(self._role)

    @property
    def receive_key(self) -> bytes:
        """The key for data that the other end sends."""
        return self._key(self._role.other)

    def _key(self, sender: Role) -> bytes:
        if not self._is_done:
            raise StateError("keys of a connection whose other end has not proved who it is")
        return self._keys[sender]

    def start(self) -> bytes:
        """Return what to send first."""
        return self._hello

    def take(self, data: bytes | bytearray | memoryview) -> bytes:
        """Take received bytes, in pieces of any size; return what to send.

        Raises
        ------
        AuthenticationError
            The other end is not authorised: close the connection. The text follows the other end's
            name: "10.0.0.7:41234 does not know ...". Every later call raises the same error.
        StateError
            The handshake is done already.
        """
        if self._failure:
            raise AuthenticationError(self._failure)
        if self._is_done:
            raise StateError("the handshake is done: what comes belongs to the next layer")
        self._held += data
        answer = b""
        if not self._other_hello:
            answer = self._take_hello()
        if self._other_hello and not self._is_done and len(self._held) >= PROOF_BYTES:
            answer += self._take_proof()
        return answer

    def closed(self) -> AuthenticationError:
        """Return the error for a connection that the other end closed before `is_done`."""
        if self._failure:
            return AuthenticationError(self._failure)
        if not self._other_hello:
            return AuthenticationError(
                "closed the connection without gpucoll's greeting: is a rank of the job there?"
            )
        if self._role is Role.ACCEPTS:
            return AuthenticationError(
                "closed the connection before it had proved that it knows the job's secret: it "
                "ended, or was no rank of the job"
            )
        return AuthenticationError(
            "closed the connection instead of taking this rank's proof: it has another secret "
            f"({_SECRETS}) or takes the connection for another one (two jobs at one address?); "
            "the error there says which"
        )

    # --- what comes -------------------------------------------------------------------------------

    def _take_hello(self) -> bytes:
        self._check_head()
        if len(self._held) < HELLO_BYTES:
            return b""
        self._other_hello = bytes(self._held[:HELLO_BYTES])
        del self._held[:HELLO_BYTES]
        self._derive()
        if self._role is Role.ACCEPTS:
            return b""
        if self._held:
            raise self._fail("sent more than its greeting before this end had proved anything")
        return self._proofs[self._role]

    def _check_head(self) -> None:
        """Raise as soon as the received part of a hello is wrong: a stranger may send no more."""
        held = bytes(self._held[: _HEAD.size])
        if why := spoke_tls(held):
            raise self._fail(why)
        if not MAGIC.startswith(held[: len(MAGIC)]):
            raise self._fail(
                f"is no gpucoll, or another version: it sent {held[: len(MAGIC)]!r} where "
                f"{MAGIC!r} begins. Are address and port those of this job?"
            )
        if len(held) < _HEAD.size:
            return
        _, version, role = _HEAD.unpack(held)
        if version != PROTOCOL_VERSION:
            raise self._fail(
                f"is another version of gpucoll: it speaks version {version} of the protocol, and "
                f"this end version {PROTOCOL_VERSION}. Install one version of gpucoll on all hosts"
            )
        if role != self._role.other.value:
            verb = self._role.name.lower()
            raise self._fail(
                f"sent no greeting of the other end: this end {verb}. Does something on the way "
                "send back what it gets?"
            )

    def _take_proof(self) -> bytes:
        given = bytes(self._held[:PROOF_BYTES])
        expected = self._proofs[self._role.other]
        if not hmac.compare_digest(given[:DIGEST_BYTES], expected[:DIGEST_BYTES]):
            raise self._fail(f"does not know the job's secret ({_SECRETS})")
        if not hmac.compare_digest(given, expected):
            raise self._fail(
                "knows the job's secret but takes this connection for another one: another job, "
                "another meeting of the same job, or other ranks. Do two jobs share one address?"
            )
        del self._held[:PROOF_BYTES]
        if self._role is Role.ACCEPTS and self._held:
            raise self._fail("sent more before this end had proved that it knows the secret")
        self._is_done = True
        return b"" if self._role is Role.CONNECTS else self._proofs[self._role]

    def _fail(self, text: str) -> AuthenticationError:
        self._failure = text
        self._held.clear()
        return AuthenticationError(text)

    # --- what the secret gives --------------------------------------------------------------------

    def _derive(self) -> None:
        """Make the proofs of both ends, and the keys."""
        hellos = [self._hello, self._other_hello]
        if self._role is Role.ACCEPTS:
            hellos.reverse()
        nonces = b"".join(hello[_HEAD.size :] for hello in hellos)
        extracted = extract(nonces, self._secret)
        proof_key = expand(extracted, b"gpucoll proof\0", KEY_BYTES)
        for role in Role:
            transcript = bytes([role.value]) + b"".join(hellos)
            self._proofs[role] = mac(proof_key, b"secret" + transcript) + mac(
                proof_key, b"purpose" + transcript + self._purpose
            )
        keys = expand(extracted, b"gpucoll keys\0" + self._purpose, 2 * KEY_BYTES)
        self._keys = {Role.CONNECTS: keys[:KEY_BYTES], Role.ACCEPTS: keys[KEY_BYTES:]}


def _hello(role: Role, nonce: bytes) -> bytes:
    return _HEAD.pack(MAGIC, PROTOCOL_VERSION, role.value) + nonce
