"""Tags by which ranks of several hosts know that an object is as another rank has sent it.

Whoever unpickles an object runs any code that it names. The connections for arrays are not
protected without TLS, so each object carries HMAC-SHA256 with a key of the communicator, over its
bytes, its sender and receiver, and the number of the call. An object that was altered, or recorded
in an earlier call, has another tag, and is not unpickled.
"""

from __future__ import annotations

import struct
from typing import Final

from gpucoll.calls.parcels import Arrival, Parcel
from gpucoll.collectives import Collective
from gpucoll.errors import AuthenticationError
from gpucoll.group.protocol import Group
from gpucoll.wording import rank_of

TAG_BYTES: Final = 32
"""Size of a tag: a whole HMAC-SHA256."""
EVERYONE: Final = -1
"""In place of a receiver, for an object that all ranks get."""
_ABOUT: Final = struct.Struct("<7q")


def tags_of(group: Group, collective: Collective) -> ObjectTags | None:
    """Return the tags of a call that begins; None: nobody between the ranks can alter objects."""
    key = group.object_key
    return None if key is None else ObjectTags(group, key, collective)


class ObjectTags:
    """The tags of the objects of one call.

    Parameters
    ----------
    group : Group
        The ranks.
    key : bytes
        The group's key.
    collective : Collective
        The call.
    """

    def __init__(self, group: Group, key: bytes, collective: Collective) -> None:
        self._group = group
        self._key = key
        self._collective = collective
        self._number = group.number

    def of(self, parcel: Parcel | Arrival, sender: int, receiver: int = EVERYONE) -> bytes:
        """Return the tag of an object."""
        import hmac  # on one host nothing needs it

        sizes = len(parcel.tail), len(parcel.large)
        about = self._number, int(self._collective), sender, receiver, parcel.n_parts, *sizes
        tag = hmac.new(self._key, _ABOUT.pack(*about), "sha256")
        tag.update(parcel.tail)
        for part in parcel.large:
            tag.update(part.data)
        return tag.digest()

    def check(self, tag: bytes, arrival: Arrival, sender: int, receiver: int = EVERYONE) -> None:
        """Raise AuthenticationError, and abort the communicator, if an object is not as sent."""
        import hmac

        if hmac.compare_digest(tag, self.of(arrival, sender, receiver)):
            return
        group = self._group
        error = AuthenticationError(
            f"{self._collective.spelled} on {rank_of(group.rank, group.world_size)}: the object of "
            f"rank {sender} is not as that rank has sent it: it was altered on the way between "
            "hosts. It was not unpickled. Who can change traffic between these hosts? TLS "
            "(docs/security.md) protects arrays, too. The communicator was aborted; close it"
        )
        group.note_exception(error)
        group.abort()
        raise error
