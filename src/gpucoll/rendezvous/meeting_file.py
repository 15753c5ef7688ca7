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
from gpucoll.rendezvous.meeting_points import SharedPoint

__all__ = ["FilePoint"]

_MOST_BYTES = 4096
_SECRET_BYTES = 32
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class FilePoint(SharedPoint):
    """A file on a file system that all hosts share: a store of one key.

    Parameters
    ----------
    path : str
        Absolute path. A meeting with a name has a file of its own next to it: ``path.name``.
    name : str
        The meeting's name; a file of a meeting with another name is ignored.
    """

    def __init__(self, path: str, name: str = "") -> None:
        self.path = f"{path}.{_file_name(name)}" if name else path
        super().__init__(name, f"file://{self.path}")
        self._written: tuple[int, int] | None = None
        """Device and inode of the file that this rank has written."""

    # --- rank 0 ---------------------------------------------------------------------------------

    def set(self, key: str, text: str) -> None:
        """Write the file in one step: a reader finds all of it, or what was there before.

        Raises
        ------
        RendezvousError
            The file cannot be written.
        """
        content = {
            "gpucoll": 1,
            "meeting": key,
            "address": text,
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

    def delete(self, key: str) -> None:
        """Remove the file, unless it is another job's by now."""
        written, self._written = self._written, None
        if written is None:
            return
        with contextlib.suppress(OSError):
            status = os.lstat(self.path)
            if (status.st_dev, status.st_ino) == written:
                os.unlink(self.path)

    # --- the others -----------------------------------------------------------------------------

    def get(self, key: str) -> str:
        """Return the address in the file; empty: there is no file, or it is another meeting's.

        Raises
        ------
        AuthenticationError
            The file belongs to another user, or other users can read or write it.
        """
        self._secret = None
        try:
            data = self._read()
        except FileNotFoundError:
            has_folder = os.path.isdir(os.path.dirname(self.path))
            return self._nothing("" if has_folder else "has no folder here")
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise AuthenticationError(
                    f"the meeting point {self.text} is a symbolic link, which is not followed: it "
                    "must be a file that rank 0 has written"
                ) from None
            # The file server may be away.
            return self._nothing(f"cannot be read here: {error.strerror}")
        try:
            return self._taken(key, data)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            return self._nothing(f"has no address of rank 0 in it: {error}"[:200])

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

    def _taken(self, key: str, data: bytes) -> str:
        content = json.loads(data)
        meeting, address, secret = (content[name] for name in ("meeting", "address", "secret"))
        if meeting != key:
            return self._nothing(f"is of the meeting {meeting!r}, and this one is {key!r}"[:300])
        split_address(address)
        self._secret = None if secret is None else bytes.fromhex(secret)
        self.trouble = ""
        return str(address)

    def _nothing(self, trouble: str) -> str:
        self.trouble = f"the meeting point {self.text} {trouble}" if trouble else ""
        return ""


def _file_name(name: str) -> str:
    if _PLAIN_NAME.fullmatch(name):
        return name
    return "name-" + blake2b(name.encode(), digest_size=16).hexdigest()
