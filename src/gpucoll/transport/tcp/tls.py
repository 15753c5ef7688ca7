"""TLS 1.3 between ranks, by Python's `ssl`: both ends present certificates of the job's own CA.

An end with such a certificate may connect from any address. Host names in it are not checked,
because ranks find each other by the addresses that the meeting gives them. The job's secret proves
that an end is a rank: its handshake follows inside TLS and has the certificates of both ends bound
in (`TlsSocket.binding`).
"""

from __future__ import annotations

import functools
import socket
import ssl
from typing import Final

from gpucoll import config
from gpucoll.errors import ArgumentError
from gpucoll.transport.tcp.certificate_files import CertificateFiles
from gpucoll.transport.tcp.handshake import Role
from gpucoll.transport.tcp.tls_errors import remedy
from gpucoll.transport.tcp.tls_socket import TlsSocket, certificate_digest

__all__ = ["Tls"]

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
