"""A meeting point in a file: rank 0 writes where it listens, the others read it.

The file exists for the length of the meeting, readable by its owner alone, so it can also carry a
secret. A job that was killed leaves its file behind, and nothing in it tells the ranks of a later
job that it is stale. They connect in vain and read again, until they find the file with which their
own rank 0 has replaced it. Rank 0 replaces any file that it finds, so two jobs at a time need two
files or names.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat

from gpucoll.errors import AuthenticationError, RendezvousError
from gpucoll.hashing import blake2b
from gpucoll.rendezvous.addresses import split_address

__all__ = ["FilePoint"]

_MOST_BYTES = 4096
_SECRET_BYTES = 32
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class FilePoint:
    """A file on a file system that all hosts share.

    Parameters
    ----------
    path : str
        Absolute path. A meeting with a name has a file of its own next to it: ``path.name``.
    name : str
        The meeting's name; a file of a meeting with another name is ignored.
    number : int
        The meeting's number among those of this name.
    """

    def __init__(self, path: str, name: str = "", number: int = 0) -> None:
        self._path, self._name, self._number = path, name, number
        self.path = f"{path}.{_file_name(name)}" if name else path
        self.text = f"file://{self.path}"
        self.trouble = ""
        self._secret: bytes | None = None
        self._written: tuple[int, int] | None = None
        """Device and inode of the file that this rank has written."""
        self._address: str | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FilePoint):
            return False
        return (self.path, self._number) == (other.path, other._number)

    def __hash__(self) -> int:
        return hash((self.path, self._number))

    def numbered(self, number: int) -> FilePoint:
        """Return the point of another meeting in the same file."""
        return FilePoint(self._path, self._name, number)

    def listen_at(self) -> None:
        """Return None: rank 0 may listen at any port."""

    def leads_to(self) -> str | None:
        """Return rank 0's host, once it is known."""
        return split_address(self._address)[0] if self._address else None

    # --- rank 0 ---------------------------------------------------------------------------------

    def publish(self, address: str) -> None:
        """Write the address in one step: a reader finds all of it, or what was there before.

        Raises
        ------
        RendezvousError
            The file cannot be written.
        """
        content = {
            "gpucoll": 1,
            "meeting": self._meeting,
            "address": address,
            "secret": None if self._secret is None else self._secret.hex(),
        }
        folder, name = os.path.split(self.path)
        temporary = os.path.join(folder, f".{name}.{os.urandom(8).hex()}")
        try:
            self._write(temporary, json.dumps(content).encode())
            os.replace(temporary, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            self._written = None
            raise RendezvousError(
                f"rank 0 cannot write the meeting point {self.text}: {error.strerror}. It must "
                "name a file in a folder that this user can write to, on a file system that all "
                "hosts share"
            ) from error

    def _write(self, path: str, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
            status = os.fstat(descriptor)
        self._written = status.st_dev, status.st_ino

    def withdraw(self) -> None:
        """Remove the file, unless it is another job's by now."""
        written, self._written = self._written, None
        if written is None:
            return
        with contextlib.suppress(OSError):
            status = os.lstat(self.path)
            if (status.st_dev, status.st_ino) == written:
                os.unlink(self.path)

    # --- the others -----------------------------------------------------------------------------

    def find(self) -> str | None:
        """Return the address in the file; None: there is no file, or it is another meeting's.

        Raises
        ------
        AuthenticationError
            The file belongs to another user, or other users can read or write it.
        """
        try:
            data = self._read()
        except FileNotFoundError:
            self._forget("" if os.path.isdir(os.path.dirname(self.path)) else "has no folder here")
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise AuthenticationError(
                    f"the meeting point {self.text} is a symbolic link, which is not followed: it "
                    "must be a file that rank 0 has written"
                ) from None
            self._forget(f"cannot be read here: {error.strerror}")  # the file server may be away
            return None
        try:
            self._take(data)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self._forget(f"has no address of rank 0 in it: {error}"[:200])
        return self._address

    def secret(self) -> bytes | None:
        """Return the secret in the file; on rank 0, make the one that `publish` will write."""
        if self._secret is None and self._address is None:
            self._secret = os.urandom(_SECRET_BYTES)
        return self._secret

    def _read(self) -> bytes:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(self.path, flags)
        with os.fdopen(descriptor, "rb") as file:
            self._check_owner(os.fstat(descriptor))
            return file.read(_MOST_BYTES)

    def _check_owner(self, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            wrong = "is no regular file"
        elif status.st_uid != os.geteuid():
            wrong = f"belongs to user {status.st_uid}, and this process to user {os.geteuid()}"
        elif status.st_mode & 0o077:
            wrong = f"is open to other users (mode {stat.S_IMODE(status.st_mode):o}, not 600)"
        else:
            return
        raise AuthenticationError(
            f"the meeting point {self.text} {wrong}: it must be the file that rank 0 of this job "
            "has written. Remove it, or name another"
        )

    def _take(self, data: bytes) -> None:
        content = json.loads(data)
        meeting, address, secret = (content[key] for key in ("meeting", "address", "secret"))
        if meeting != self._meeting:
            self._forget(f"is of the meeting {meeting!r}, and this one is {self._meeting!r}"[:300])
            return
        split_address(address)
        self._secret = None if secret is None else bytes.fromhex(secret)
        self._address, self.trouble = address, ""

    def _forget(self, trouble: str) -> None:
        self._address = self._secret = None
        self.trouble = f"the meeting point {self.text} {trouble}" if trouble else ""

    @property
    def _meeting(self) -> str:
        return f"{self._name}#{self._number}"


def _file_name(name: str) -> str:
    if _PLAIN_NAME.fullmatch(name):
        return name
    return "name-" + blake2b(name.encode(), digest_size=16).hexdigest()
