"""Objects that somebody on the way between hosts has altered: they are refused, not unpickled."""

from __future__ import annotations

import numpy as np
import pytest

from gpucoll.calls import parcels
from gpucoll.calls.object_tags import tags_of
from gpucoll.calls.objects import _HEAD, _PLACE, FIRST_BYTES, Head, ObjectMover
from gpucoll.collectives import Collective
from gpucoll.errors import AbortedError, AuthenticationError

VICTIM = 1
PICKLE = _HEAD.size + 12
"""A place in a small object's pickle, in the first round."""
SMALL, LARGE = b"small", np.arange(100_000)
WITH_A_TAIL = [bytes(10_000), 1]
ROUNDS = {"small": "_first", "with a tail": "_spread", "large": "_spread"}
OBJECTS = {"small": SMALL, "with a tail": WITH_A_TAIL, "large": LARGE}


def altered(method, place):
    """Return a round after which one byte of what came from rank 0 is another."""

    def run(mover, *arguments, **options):
        found = method(mover, *arguments, **options)
        received = mover._everyone if method.__name__ == "_first" else arguments[3]
        memory = np.frombuffer(received, np.uint8)
        memory.flags.writeable = True
        memory[place] ^= 1
        return found

    return run


def in_the_middle(patch, comm, name, place):
    if comm.rank == VICTIM:
        patch.setattr(ObjectMover, name, altered(getattr(ObjectMover, name), place))
        patch.setattr(parcels.Arrival, "unpack", lambda _: pytest.fail("it was unpickled"))


def refusal(comm, call):
    try:
        call()
        comm.barrier()
    except (AuthenticationError, AbortedError) as error:
        return type(error), str(error)
    return None


def broadcast_altered(comm, name):
    with pytest.MonkeyPatch.context() as patch:
        in_the_middle(patch, comm, ROUNDS[name], PICKLE)
        return refusal(comm, lambda: comm.broadcast_object(OBJECTS[name], root=0))


@pytest.mark.parametrize("name", OBJECTS)
def test_an_altered_broadcast(hosts, name):
    (other, _), (victim, text) = hosts.call("ab", broadcast_altered, name)

    assert (victim, other) == (AuthenticationError, AbortedError)
    assert "broadcast_object on rank 1 of 2: the object of rank 0 is not as that rank" in text


def call_altered(comm, name):
    calls = {
        "gather_object": lambda: comm.gather_object(SMALL, root=VICTIM),
        "all_gather_object": lambda: comm.all_gather_object(SMALL),
        "scatter_object": lambda: comm.scatter_object([SMALL] * 2 if comm.rank == 0 else None),
    }
    with pytest.MonkeyPatch.context() as patch:
        place = PICKLE + 2 * _PLACE.size if name == "scatter_object" else PICKLE
        in_the_middle(patch, comm, "_first", place)
        return refusal(comm, calls[name])


@pytest.mark.parametrize("name", ["gather_object", "all_gather_object", "scatter_object"])
def test_other_calls(hosts, name):
    (other, _), (victim, text) = hosts.call("ab", call_altered, name)

    assert (victim, other) == (AuthenticationError, AbortedError)
    assert f"{name} on rank 1 of 2" in text


def receive_again(comm):
    """Return what becomes of an object of an earlier call, as somebody may have recorded it."""
    first = ObjectMover._first
    recorded = []

    def run(mover, *arguments, **options):
        first(mover, *arguments, **options)
        recorded.append(mover._everyone[:FIRST_BYTES].copy())
        mover._everyone[:FIRST_BYTES] = recorded[0]
        return {0: Head._make(_HEAD.unpack_from(recorded[0]))}

    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == VICTIM:
            patch.setattr(ObjectMover, "_first", run)
        assert comm.broadcast_object("run the backup", root=0) == "run the backup"
        return refusal(comm, lambda: comm.broadcast_object("stop", root=0))


def test_an_object_of_an_earlier_call(hosts):
    (other, _), (victim, _) = hosts.call("ab", receive_again)

    assert (victim, other) == (AuthenticationError, AbortedError)


def tag_of(comm):
    parcel, tags = parcels.pack(SMALL), tags_of(comm._group, Collective.BROADCAST_OBJECT)
    return tags and (tags.of(parcel, 0), tags.of(parcel, 1))


def test_tags_depend_on_the_communicator_and_on_the_sender(hosts):
    (mine, of_another), (theirs, _) = hosts.call("ab", tag_of)
    again = hosts.call("ab", tag_of)[0][0]

    assert mine == theirs
    assert len({mine, of_another, again}) == 3


def test_ranks_of_one_host_need_none(hosts):
    assert hosts.call("aa", tag_of) == [None, None]
