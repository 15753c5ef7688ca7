"""What a rank shows to others over TCP: the job's secret and, where TLS is on, a certificate."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gpucoll.errors import ArgumentError
from gpucoll.transport.tcp.certificate_files import certificate_files

if TYPE_CHECKING:
    from gpucoll.transport.tcp.tls import Tls

__all__ = ["Credentials", "job_tls"]


class Credentials(NamedTuple):
    """By what the ranks of a job know each other.

    Attributes
    ----------
    secret : bytes
        The job's.
    tls : Tls or None
        Encrypts every connection, where certificates are set.
    """

    secret: bytes
    tls: Tls | None


def job_tls(who: str) -> Tls | None:
    """Return this rank's certificates, by the environment; None where it names none.

    Parameters
    ----------
    who : str
        This rank: errors begin with it.

    Raises
    ------
    ArgumentError
        They cannot serve: other ranks would refuse them.
    """
    try:
        files = certificate_files()
        if files is None:
            return None
        from gpucoll.transport.tcp.tls import Tls  # OpenSSL is loaded where it is asked for

        return Tls(files)
    except ArgumentError as error:
        raise ArgumentError(f"{who}: {error}") from None
