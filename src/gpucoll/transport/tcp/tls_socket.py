"""A TCP connection that encrypts, used like a socket that does not block."""

from __future__ import annotations

import hashlib
import select
import socket
import ssl
from collections.abc import Callable
from typing import Final

from gpucoll.errors import AuthenticationError
from gpucoll.transport.tcp.handshake import MAGIC, ClosedEarlyError, Role, encode_purpose
from gpucoll.transport.tcp.one_sided_tls import SPOKE_PLAINLY, is_tls_greeting, send_alert
from gpucoll.transport.tcp.tls_errors import refusal

__all__ = ["TlsSocket", "certificate_digest", "is_in_kernel"]

_SOL_TLS, _TLS_TX, _TLS_RX = 282, 1, 2
_KIND_BYTES: Final = 4
"""Size of version and cipher: so many bytes suffice for any cipher."""
_ENDED_EARLY: Final = (
    "closed the connection while TLS was to begin: it ended, has no place now, or has no "
    "certificates"
)


Wrap = Callable[[socket.socket], ssl.SSLSocket]


class TlsSocket:
    """One end of a connection.

    Parameters
    ----------
    end : socket
        A connected socket, not blocking; belongs to this object from here on.
    wrap : callable
        Returns the socket wrapped by the context of this role.
    digest : bytes
        Digest of this rank's certificate.
    role : Role
        Which end this is.
    """

    def __init__(self, end: socket.socket, wrap: Wrap, digest: bytes, role: Role) -> None:
        self._end = end
        self._wrap = wrap
        self._digest = digest
        self._role = role
        self._secured: ssl.SSLSocket | None = None
        self.wants = select.POLLOUT if role is Role.CONNECTS else select.POLLIN
        """The events to poll for before calling `proceed`."""

    def proceed(self) -> bool:
        """Go on with the TLS handshake; return whether it is complete.

        Raises
        ------
        AuthenticationError
            The other end is not authorised, or refuses this one; the text follows the other end's
            name.
        OSError
            The other end is gone.
        """
        if self._secured is None and not self._has_come():
            self.wants = select.POLLIN
            return False
        try:
            if self._secured is None:
                self._end = self._secured = self._wrap(self._end)
            self._secured.do_handshake()
        except ssl.SSLWantReadError:
            self.wants = select.POLLIN
            return False
        except ssl.SSLWantWriteError:
            self.wants = select.POLLOUT
            return False
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise ClosedEarlyError(_ENDED_EARLY) from None
        except ssl.SSLError as error:
            raise refusal(error) from None
        return True

    def _has_come(self) -> bool:
        """Return whether TLS can begin: the other end's first bytes have come, and are TLS."""
        if self._role is Role.CONNECTS:
            return True
        try:
            begin = self._end.recv(len(MAGIC), socket.MSG_PEEK)
        except BlockingIOError:
            return False
        if not begin:
            raise ClosedEarlyError(_ENDED_EARLY)
        if is_tls_greeting(begin):
            return True
        if not MAGIC.startswith(begin):
            raise AuthenticationError(
                f"is no gpucoll: it sent {begin!r} where TLS begins. Are address and port those of "
                "this job?"
            )
        send_alert(self._end)
        raise AuthenticationError(SPOKE_PLAINLY)

    def binding(self) -> bytes:
        """Return bytes that stand for the certificates of both ends, the same at each end.

        A man in the middle with another certificate of the same CA cannot forward proofs that have
        these bytes bound in. (Python does not provide TLS 1.3's own value for this, tls-exporter.)
        """
        assert self._secured is not None
        theirs = certificate_digest(self._secured.getpeercert(binary_form=True) or b"")
        digests = [self._digest, theirs]
        if self._role is Role.CONNECTS:
            digests.reverse()
        return encode_purpose("TLS", *digests)

    # --- as a socket ------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._end.fileno()

    def getsockname(self) -> tuple[str, int]:
        """Return this end's address."""
        address: tuple[str, int] = self._end.getsockname()
        return address

    def send(self, data: bytes | bytearray, _flags: int = 0) -> int:
        """Send some data; the next call must begin with what was not sent.

        Raises
        ------
        BlockingIOError
            The other end takes nothing now.
        OSError
            The other end is gone.
        """
        assert self._secured is not None
        try:
            return self._secured.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise BrokenPipeError("the other end is gone") from None
        except ssl.SSLError as error:
            raise refusal(error) from None

    def recv(self, n_bytes: int) -> bytes:
        """Return what has come, `n_bytes` at most; empty: the other end has closed.

        Raises
        ------
        BlockingIOError
            Nothing has come.
        AuthenticationError
            The other end refuses this one, or data was changed on the way.
        """
        assert self._secured is not None
        try:
            return self._secured.recv(n_bytes)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            return b""
        except ssl.SSLError as error:
            raise refusal(error) from None

    @property
    def n_pending(self) -> int:
        """The number of received bytes that a poll does not show."""
        return 0 if self._secured is None else self._secured.pending()

    def detach(self) -> ssl.SSLSocket:
        """Return the socket of Python's `ssl`."""
        assert self._secured is not None
        return self._secured

    def close(self) -> None:
        """Close the socket."""
        self._end.close()


def certificate_digest(certificate: bytes) -> bytes:
    """Return the digest of a certificate, given in DER."""
    return hashlib.sha256(certificate).digest()


def is_in_kernel(end: ssl.SSLSocket) -> bool:
    """Return whether the kernel encrypts and decrypts data over the socket's plain descriptor."""
    for direction in (_TLS_TX, _TLS_RX):
        try:
            end.getsockopt(_SOL_TLS, direction, _KIND_BYTES)
        except OSError:
            return False
    return True
