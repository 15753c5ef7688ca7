"""What a rank proves to others over TCP: the job's secret and, with TLS, its certificate."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gpucoll.errors import ArgumentError
from gpucoll.transport.tcp.certificate_files import certificate_files

if TYPE_CHECKING:
    from gpucoll.transport.tcp.tls import Tls

__all__ = ["Credentials", "job_tls"]


class Credentials(NamedTuple):
    """The means by which the ranks of a job authenticate each other.

    Attributes
    ----------
    secret : bytes
        The job's secret.
    tls : Tls or None
        Encrypts every connection; None if no certificates are set.
    """

    secret: bytes
    tls: Tls | None


def job_tls(who: str) -> Tls | None:
    """Return TLS with this rank's certificates from the environment; None: it names none.

    Parameters
    ----------
    who : str
        This rank; errors begin with it.

    Raises
    ------
    ArgumentError
        The certificates cannot be used: other ranks would refuse them.
    """
    try:
        files = certificate_files()
        if files is None:
            return None
        from gpucoll.transport.tcp.tls import Tls  # OpenSSL is loaded only if TLS is on

        return Tls(files)
    except ArgumentError as error:
        raise ArgumentError(f"{who}: {error}") from None
