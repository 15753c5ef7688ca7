"""What a rank proves to others over TCP: the job's secret and, with TLS, its certificate."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Final, NamedTuple

from gpucoll import config
from gpucoll.errors import ArgumentError

if TYPE_CHECKING:
    from gpucoll.transport.tcp.tls import Tls

_VARIABLES: Final = (config.TLS_CERT, config.TLS_KEY, config.TLS_CA)
_READ_BY_OTHERS: Final = stat.S_IRGRP | stat.S_IROTH
_WRITTEN_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


class CertificateFiles(NamedTuple):
    """The paths of this rank's certificate, its key, and the CA's certificate."""

    certificate: str
    key: str
    ca: str


def certificate_files() -> CertificateFiles | None:
    """Return the files that the environment names; None: it names none.

    An empty variable counts as not set.

    Raises
    ------
    ArgumentError
        Some variables are set and some are not, or a file cannot be used.
    """
    named = {name: config.variable(name) for name in _VARIABLES}
    missing = [name for name, path in named.items() if not path]
    if len(missing) == len(named):
        return None
    if missing:
        there = [name for name in named if name not in missing]
        raise ArgumentError(
            f"{' and '.join(there)} {'is' if len(there) == 1 else 'are'} set, but not "
            f"{' and '.join(missing)}: TLS needs a certificate, its key and the CA's certificate. "
            "Set all three on every rank, or none"
        )
    for name, path in named.items():
        _check_file(name, path)
    return CertificateFiles(*named.values())


def _check_file(name: str, path: str) -> None:
    """Raise unless the file can be used, and no other user can change it, or read a key in it."""
    where = f"{name}={path}"
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ArgumentError(f"{where} cannot be opened: {why}") from None
    if not stat.S_ISREG(status.st_mode):
        raise ArgumentError(f"{where} is no regular file")
    if status.st_uid not in (0, os.geteuid()):
        raise ArgumentError(
            f"{where} belongs to user {status.st_uid}, who can replace it: it must be a file of "
            f"root or of user {os.geteuid()}, who runs this rank"
        )
    mode = f"(mode {stat.S_IMODE(status.st_mode):o})"
    if status.st_mode & _WRITTEN_BY_OTHERS:
        raise ArgumentError(
            f"{where} can be written by others than its owner {mode}, who could let anybody in: "
            f"chmod go-w {path}"
        )
    if name == config.TLS_KEY and status.st_mode & _READ_BY_OTHERS:
        raise ArgumentError(
            f"{where} can be read by others than its owner {mode}, so it is no private key: "
            f"chmod 600 {path}, and make another one if somebody may have read it"
        )


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
