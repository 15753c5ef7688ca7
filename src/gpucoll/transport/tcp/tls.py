"""TLS 1.3 between ranks, by Python's `ssl`: both ends present certificates of the job's own CA.

An end with such a certificate may connect from any address. Host names in it are not checked,
because ranks find each other by the addresses that the meeting gives them. The job's secret proves
that an end is a rank: its handshake follows inside TLS and has the certificates of both ends bound
in (`TlsSocket.binding`).
"""

from __future__ import annotations

import functools
import hashlib
import select
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from gpucoll import config
from gpucoll.errors import ArgumentError, AuthenticationError
from gpucoll.transport.tcp.handshake import MAGIC, ClosedEarlyError, Role, encode_purpose
from gpucoll.transport.tcp.one_sided_tls import (
    EVERYWHERE,
    SPOKE_PLAINLY,
    is_tls_greeting,
    send_alert,
)

if TYPE_CHECKING:
    from gpucoll.transport.tcp.credentials import CertificateFiles

# --- OpenSSL's errors between two ranks, as sentences that tell what to do ------------------------


_NO_TLS_THERE: Final = (
    "speaks no TLS 1.3: it has no certificates, or an OpenSSL before 1.1.1. This rank has "
    f"certificates: {EVERYWHERE}"
)
_NO_CERTIFICATE: Final = f"showed no certificate: {EVERYWHERE}"
_OTHER_CA: Final = (
    f"all certificates of a job must be signed by the CA whose certificate {config.TLS_CA} names, "
    f"the same on every rank; intermediate certificates belong into {config.TLS_CERT}"
)
_PURPOSE: Final = (
    "a rank both connects and accepts, so extendedKeyUsage must name both clientAuth and "
    "serverAuth, or not be there"
)
_REMEDIES: Final = {
    7: _OTHER_CA,
    9: "compare the clocks of the hosts",
    10: "make a new one, and compare the clocks of the hosts",
    18: _OTHER_CA,
    19: _OTHER_CA,
    20: _OTHER_CA,
    21: _OTHER_CA,
    24: f"{config.TLS_CA} must name a certificate that may sign others (CA:TRUE)",
    26: _PURPOSE,
}
"""By OpenSSL's number of the error (X509_V_ERR_...)."""
_ALERTS: Final = {
    "CERTIFICATE_REQUIRED": f"did not get this rank's certificate: {EVERYWHERE}",
    "UNKNOWN_CA": f"refuses this rank's certificate, as of an unknown CA: {_OTHER_CA}",
    "CERTIFICATE_EXPIRED": "refuses this rank's certificate, as expired: compare the clocks of the "
    "hosts",
    "UNSUPPORTED_CERTIFICATE": f"refuses this rank's certificate: {_PURPOSE}",
    "PROTOCOL_VERSION": _NO_TLS_THERE,
    "DECRYPT_ERROR": f"refuses this rank's certificate, as not signed by that CA: {_OTHER_CA}",
}
"""By the alert that the other end has sent."""
_REASONS: Final = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": _NO_CERTIFICATE,
    "UNSUPPORTED_PROTOCOL": _NO_TLS_THERE,
    "WRONG_VERSION_NUMBER": _NO_TLS_THERE,
    "RECORD_LAYER_FAILURE": _NO_TLS_THERE,
    "HTTP_REQUEST": "is no gpucoll: it speaks HTTP",
}


def remedy(error: ssl.SSLCertVerificationError) -> str:
    """Return what is wrong with a certificate, and the remedy."""
    what = _REMEDIES.get(error.verify_code, _OTHER_CA)
    return f"{error.verify_message}: {what}"


def refusal(error: ssl.SSLError) -> AuthenticationError:
    """Return the error for a failed TLS handshake; its text follows the other end's name."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return AuthenticationError(
            f"showed a certificate that this rank does not accept, {remedy(error)}"
        )
    reason = error.reason or ""
    if reason in _REASONS:
        return AuthenticationError(_REASONS[reason])
    alert = reason.partition("ALERT_")[2]
    if alert in _ALERTS:
        return AuthenticationError(_ALERTS[alert])
    if alert:
        words = alert.replace("_", " ").lower()
        return AuthenticationError(f"refuses this connection by TLS ({words})")
    return AuthenticationError(
        f"sent what is no TLS, or was changed on the way ({reason or error.strerror or error})"
    )


# --- a connection that encrypts, used like a socket that does not block ---------------------------


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


# --- this rank's certificates ---------------------------------------------------------------------


_KERNEL_TLS: Final[int] = getattr(ssl, "OP_ENABLE_KTLS", 0)
"""Lets OpenSSL give the keys to the kernel if the kernel takes them: from Python 3.12 on."""
_TURNS: Final = 10


class Tls:
    """This rank's certificates, and the TLS contexts that use them.

    Parameters
    ----------
    files : CertificateFiles
        The paths of the certificates.

    Raises
    ------
    ArgumentError
        The certificates cannot be used, or other ranks with the same CA would refuse them.
    """

    def __init__(self, files: CertificateFiles) -> None:
        self._contexts = {
            Role.ACCEPTS: _context(ssl.PROTOCOL_TLS_SERVER, files),
            Role.CONNECTS: _context(ssl.PROTOCOL_TLS_CLIENT, files),
        }
        self._contexts[Role.ACCEPTS].num_tickets = 0  # no rank resumes a session
        self._digest = certificate_digest(self._check_own(files))

    def socket(self, end: socket.socket, role: Role) -> TlsSocket:
        """Return a connected socket over which TLS is to begin; it takes over `end`."""
        wrap = functools.partial(
            self._contexts[role].wrap_socket,
            server_side=role is Role.ACCEPTS,
            do_handshake_on_connect=False,
            suppress_ragged_eofs=False,
        )
        return TlsSocket(end, wrap, self._digest, role)

    def _check_own(self, files: CertificateFiles) -> bytes:
        """Verify this rank's certificate as the other ranks will; return it, in DER."""
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        accepts, connects = self._contexts[Role.ACCEPTS], self._contexts[Role.CONNECTS]
        client = connects.wrap_bio(to_client, to_server)
        ends = [client, accepts.wrap_bio(to_server, to_client, server_side=True)]
        try:
            for _ in range(_TURNS):
                ends = [end for end in ends if not _is_over(end)]
        except ssl.SSLCertVerificationError as error:
            raise ArgumentError(
                f"{config.TLS_CERT}={files.certificate} would be refused by the other ranks "
                f"({config.TLS_CA}={files.ca}), {remedy(error)}"
            ) from None
        except ssl.SSLError as error:
            raise ArgumentError(
                f"{config.TLS_CERT}={files.certificate} cannot serve for TLS 1.3: "
                f"{error.reason or error}"
            ) from None
        return client.getpeercert(binary_form=True) or b""


def _is_over(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _context(protocol: int, files: CertificateFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_TICKET | _KERNEL_TLS
    _load_ca(context, files.ca)
    _load_own(context, files)
    return context


def _load_ca(context: ssl.SSLContext, path: str) -> None:
    where = f"{config.TLS_CA}={path}"
    try:
        context.load_verify_locations(path)
    except ssl.SSLError:
        raise ArgumentError(f"{where} holds no certificate in PEM") from None
    except OSError as error:
        raise ArgumentError(f"{where} cannot be read: {error.strerror}") from None
    if not context.get_ca_certs():
        raise ArgumentError(
            f"{where} holds no certificate of a CA: none in it may sign others (CA:TRUE)"
        )


def _load_own(context: ssl.SSLContext, files: CertificateFiles) -> None:
    def ask() -> str:
        raise _EncryptedKeyError

    what = f"{config.TLS_CERT}={files.certificate} and {config.TLS_KEY}={files.key}"
    try:
        context.load_cert_chain(files.certificate, files.key, password=ask)
    except _EncryptedKeyError:
        raise ArgumentError(
            f"{config.TLS_KEY}={files.key} is encrypted, and a rank cannot ask for its "
            "passphrase: give a key without one, in a file that only its user can read"
        ) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ArgumentError(
                f"{what} do not belong together: the key is another certificate's"
            ) from None
        reason = error.reason or error.strerror or str(error)
        raise ArgumentError(
            f"{what} cannot be used ({reason}): each must be in PEM, as openssl writes it"
        ) from None
    except OSError as error:
        raise ArgumentError(f"{what} cannot be read: {error.strerror}") from None


class _EncryptedKeyError(Exception):
    """OpenSSL asks for a passphrase."""
