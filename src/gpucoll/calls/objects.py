"""How Python objects go from rank to rank: one exchange for small ones, more rounds for others.

The first round is an all_gather of a fixed size. It carries the numbers that describe each rank's
object, and the beginning of the object. The rest follows in calls whose sizes all participants know
by then.

Objects that fit into the first round are broadcast by one compiled call, from the second broadcast
with the same root on.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.protocol import HostBackend, ObjectEntry, PartOf, PreparedCall, Request
from gpucoll.calls.given import AnyObject, Unchecked
from gpucoll.calls.object_tags import TAG_BYTES, ObjectTags, tags_of
from gpucoll.calls.parcels import (
    NOTHING,
    Arrival,
    Bytes,
    Parcel,
    buffer_of,
    pack,
    parcel_of,
    pickled,
)
from gpucoll.calls.runner import Runner
from gpucoll.collectives import NO_ROOT, Collective
from gpucoll.errors import ArgumentTypeError
from gpucoll.group.in_one_piece import give_up, in_one_piece
from gpucoll.group.protocol import Group
from gpucoll.transport.shared.words import Status
from gpucoll.wording import rank_of

FIRST_BYTES = 1024
_HEAD = struct.Struct(f"<qqqq{TAG_BYTES}s")
ROOM = FIRST_BYTES - _HEAD.size
"""Number of bytes of an object's tail that travel in the first round."""
_PLACE = struct.Struct(f"<qq{TAG_BYTES}s")
"""The place of one rank's object in a scatter: number of its parts, bytes of its tail, tag."""

_NAMES = {collective: collective.spelled for collective in Collective}
_NOT_RUN = int(Status.NOT_RUN)


class Head(NamedTuple):
    """A rank's description of its object in the first round."""

    n_parts: int
    tail_bytes: int
    n_large: int
    has_failed: int
    """Whether the object could not be pickled; the tail is then the error's text."""
    tag: bytes


class ObjectMover:
    """Moves objects between the ranks of one communicator.

    Parameters
    ----------
    runner : Runner
        Runs the calls in turn.
    host : HostBackend
        Moves bytes.
    """

    def __init__(self, runner: Runner, host: HostBackend) -> None:
        self._runner = runner
        self._host = host
        self._rank, self._world_size = runner.group.rank, runner.group.world_size
        self._mine, self._everyone = self._new_rooms()
        self._my_view, self._view = self._mine.data, self._everyone.data
        self._first_calls: dict[tuple[Collective, int], PreparedCall] = {}
        self._entry_rooms: tuple[Bytes, Bytes] | None = None
        """The rows of compiled entries, which another thread's call may be using."""
        self._has_entries = True
        self.broadcasts: dict[int, Callable[[Any], AnyObject]] = {}
        """By root: broadcasts an object without a deadline of its own, as `broadcast` does."""

    def _new_rooms(self) -> tuple[Bytes, Bytes]:
        """Return memory for this rank's row in the first round, and for all ranks' rows."""
        sizes = FIRST_BYTES, FIRST_BYTES * self._world_size
        mine, everyone = [np.zeros(size, np.uint8) for size in sizes]
        return mine, everyone

    # --- the collectives --------------------------------------------------------------------------

    def broadcast(self, value: object, root: int, timeout_s: float | None) -> AnyObject:
        """Return the root's object; on the root, the very same object."""
        is_root = self._rank == root
        packed = self._packed(Collective.BROADCAST_OBJECT, value) if is_root else (NOTHING, None)
        arrival = self.spread(root, *packed, timeout_s)
        self._learn_broadcast(root)
        return value if is_root else arrival.unpack()

    def spread(
        self,
        root: int,
        parcel: Parcel,
        failure: ArgumentTypeError | None,
        timeout_s: float | None = None,
    ) -> Arrival:
        """Give all ranks the root's object as parts; return them."""
        collective, is_root = Collective.BROADCAST_OBJECT, self._rank == root
        arrived: list[Arrival] = []

        def task(timeout_s: float | None) -> None:
            tags = tags_of(self._runner.group, collective)
            tag = tags.of(parcel, root) if tags and is_root else b""
            head = self._first(collective, root, parcel, failure, timeout_s, (root,), tag)[root]
            arrival = self._arrival(root, head)
            if head.tail_bytes > ROOM or head.n_large:
                with in_one_piece(self._runner.group):
                    self._spread_rest(collective, root, head, parcel, arrival, timeout_s)
            if tags and not is_root:
                tags.check(head.tag, arrival, root)
            arrived.append(arrival)

        self._runner.run(_NAMES[collective], task, timeout_s=timeout_s)
        return arrived[0]

    def _learn_broadcast(self, root: int) -> None:
        """Broadcast small objects from this root by a compiled entry from now on, if there is one.

        Between hosts there is none: objects have tags there.
        """
        group = self._runner.group
        if root in self.broadcasts or not self._has_entries or group.object_key is not None:
            return
        rooms = self._entry_rooms = self._entry_rooms or self._new_rooms()
        entry = self._host.object_entry(
            self._first_request(Collective.BROADCAST_OBJECT, root, rooms)
        )
        if entry is None:
            self._has_entries = False
        else:
            quick = QuickBroadcast(self, group, entry, root)
            self.broadcasts[root] = quick.give if self._rank == root else quick.take

    def spread_rest(self, root: int, row: bytes) -> Arrival:
        """Receive the rest of an object of which an entry has received the root's `row`."""
        collective = Collective.BROADCAST_OBJECT
        head = self._head_of(collective, row)
        arrival = Arrival(head.n_parts, row[_HEAD.size :][: head.tail_bytes])

        def task(timeout_s: float | None) -> None:
            with in_one_piece(self._runner.group):
                self._spread_rest(collective, root, head, NOTHING, arrival, timeout_s)

        self._runner.run(_NAMES[collective], task)
        return arrival

    def _spread_rest(
        self,
        collective: Collective,
        root: int,
        head: Head,
        parcel: Parcel,
        arrival: Arrival,
        timeout_s: float | None,
    ) -> None:
        """Give all ranks the data that did not fit into the first round."""
        is_root = self._rank == root
        if head.tail_bytes > ROOM:
            tail: Any = parcel.tail if is_root else np.empty(head.tail_bytes, np.uint8)
            self._spread(collective, root, 0, tail, timeout_s)
            arrival.tail = tail
        if not is_root:
            arrival.make_room()
        for place in range(head.n_large):
            part = (parcel.large if is_root else arrival.large)[place]
            self._spread(collective, root, 1 + place, part, timeout_s)

    def gather(
        self, collective: Collective, value: object, root: int, timeout_s: float | None
    ) -> dict[int, Arrival] | None:
        """Return the other ranks' objects on the root, or on all ranks if there is no root."""
        gets = root in (NO_ROOT, self._rank)
        parcel, failure = self._packed(collective, value)
        arrived: dict[int, Arrival] = {}

        def task(timeout_s: float | None) -> None:
            everyone = range(self._world_size)
            tags = tags_of(self._runner.group, collective)
            tag = tags.of(parcel, self._rank) if tags else b""
            heads = self._first(collective, root, parcel, failure, timeout_s, everyone, tag)
            for rank in self._others() if gets else ():
                arrived[rank] = self._arrival(rank, heads[rank])
            if any(head.tail_bytes > ROOM or head.n_large for head in heads.values()):
                with in_one_piece(self._runner.group):
                    self._gather_rest(collective, root, heads, parcel, arrived, timeout_s)
            if tags:
                for rank, arrival in arrived.items():
                    tags.check(heads[rank].tag, arrival, rank)

        self._runner.run(_NAMES[collective], task, timeout_s=timeout_s)
        return arrived if gets else None

    def _gather_rest(
        self,
        collective: Collective,
        root: int,
        heads: dict[int, Head],
        parcel: Parcel,
        arrived: dict[int, Arrival],
        timeout_s: float | None,
    ) -> None:
        """Give the receivers the data that did not fit into the first round."""
        receivers = [rank for rank in self._others() if root in (NO_ROOT, rank)]
        if any(head.tail_bytes > ROOM for head in heads.values()):
            is_long = len(parcel.tail) > ROOM
            sent = dict.fromkeys(receivers, parcel.tail) if is_long else {}
            self._move_tails(collective, root, sent, arrived, heads, timeout_s)
        sent_parts = dict.fromkeys(receivers, parcel.large)
        n_rounds = max(head.n_large for head in heads.values())
        self._move_large(collective, root, sent_parts, arrived, n_rounds, timeout_s)

    def scatter(
        self, values: Sequence[object] | None, root: int, timeout_s: float | None
    ) -> AnyObject:
        """Return this rank's item of the root's sequence."""
        collective, is_root = Collective.SCATTER_OBJECT, self._rank == root
        parcels, failed, failure = [NOTHING], NOTHING, None
        if is_root:
            assert values is not None
            parcels, failed, failure = self._packed_each(collective, values)
        arrived: dict[int, Arrival] = {}

        def task(timeout_s: float | None) -> None:
            tags = tags_of(self._runner.group, collective)
            bundle = self._bundled(parcels, tags) if is_root and failure is None else failed
            head = self._first(collective, root, bundle, failure, timeout_s, (root,))[root]
            if head.tail_bytes <= ROOM and not head.n_large:
                mine, place = self._cut_out(self._room_of(root, head.tail_bytes))
                arrived.update({} if is_root else {root: mine})
            else:
                with in_one_piece(self._runner.group):
                    place = self._scatter_rest(root, head, bundle, parcels, arrived, timeout_s)
            if tags and not is_root:
                tags.check(place.tag, arrived[root], root, self._rank)

        self._runner.run(_NAMES[collective], task, timeout_s=timeout_s)
        if is_root:
            assert values is not None
            return values[root]
        return arrived[root].unpack()

    def _cut_out(self, table: Unchecked) -> tuple[Arrival, Head]:
        """Return this rank's object, and its place, of a table of places that all tails follow."""
        places = self._places(table)
        start = _PLACE.size * self._world_size
        start += sum(place.tail_bytes for place in places[: self._rank])
        own = places[self._rank]
        return Arrival(own.n_parts, table[start : start + own.tail_bytes]), own

    def _places(self, table: Unchecked) -> list[Head]:
        entries = _PLACE.iter_unpack(bytes(table[: _PLACE.size * self._world_size]))
        return [Head(n_parts, n_bytes, 0, 0, tag) for n_parts, n_bytes, tag in entries]

    def _scatter_rest(
        self,
        root: int,
        head: Head,
        bundle: Parcel,
        parcels: list[Parcel],
        arrived: dict[int, Arrival],
        timeout_s: float | None,
    ) -> Head:
        """Give each rank the data that did not fit into the first round; return its place."""
        collective, is_root = Collective.SCATTER_OBJECT, self._rank == root
        others = self._others() if is_root else []
        if head.tail_bytes <= ROOM:
            mine, own = self._cut_out(self._room_of(root, head.tail_bytes))
            arrived.update({} if is_root else {root: mine})
        else:
            table_bytes = _PLACE.size * self._world_size
            table: Any = bundle.tail[:table_bytes] if is_root else np.empty(table_bytes, np.uint8)
            self._spread(collective, root, 0, table, timeout_s)
            own = self._places(table)[self._rank]
            arrived.update({} if is_root else {root: Arrival(own.n_parts)})
            sent = {rank: parcels[rank].tail for rank in others}
            self._move_tails(collective, root, sent, arrived, {root: own}, timeout_s, least=0)
        sent_parts = {rank: parcels[rank].large for rank in others}
        self._move_large(collective, root, sent_parts, arrived, head.n_large, timeout_s)
        return own

    # --- pickling ---------------------------------------------------------------------------------

    def _packed(
        self, collective: Collective, value: object
    ) -> tuple[Parcel, ArgumentTypeError | None]:
        """Return an object as parts, or the reason why it cannot be pickled; and the error."""
        try:
            return pack(value), None
        except Exception as error:  # of any kind: the object's own code may raise
            return self.failed(collective, value, error)

    def failed(
        self, collective: Collective, value: object, error: Exception
    ) -> tuple[Parcel, ArgumentTypeError]:
        """Return the reason why an object cannot be pickled, for the other ranks; and the error."""
        failure = ArgumentTypeError(
            f"{collective.spelled} on {rank_of(self._rank, self._world_size)}: this "
            f"{type(value).__name__} cannot be pickled: {error}. Pass data, or functions and "
            "classes of modules instead of local ones"
        )
        failure.__cause__ = error
        return Parcel(0, str(failure).encode(errors="replace")[:ROOM], []), failure

    def _packed_each(
        self, collective: Collective, values: Sequence[object]
    ) -> tuple[list[Parcel], Parcel, ArgumentTypeError | None]:
        """Return each rank's object as parts; or the reason why one cannot be pickled."""
        parcels = []
        for rank, value in enumerate(values):
            parcel, failure = (
                (NOTHING, None) if rank == self._rank else self._packed(collective, value)
            )
            if failure is not None:
                return [], parcel, failure
            parcels.append(parcel)
        return parcels, NOTHING, None

    def _bundled(self, parcels: list[Parcel], tags: ObjectTags | None) -> Parcel:
        """Return a parcel of each rank's object for the first round."""
        table = b"".join(
            _PLACE.pack(
                each.n_parts, len(each.tail), tags.of(each, self._rank, rank) if tags else b""
            )
            for rank, each in enumerate(parcels)
        )
        size_bytes = len(table) + sum(len(each.tail) for each in parcels)
        tails = [each.tail for each in parcels] if size_bytes <= ROOM else [b"\0" * ROOM]
        most = max((each.large for each in parcels), key=len)
        return Parcel(0, b"".join([table, *tails]), most)

    # --- the rounds -------------------------------------------------------------------------------

    def _others(self) -> list[int]:
        return [rank for rank in range(self._world_size) if rank != self._rank]

    def _first(
        self,
        collective: Collective,
        root: int,
        parcel: Parcel,
        failure: ArgumentTypeError | None,
        timeout_s: float | None,
        senders: Iterable[int],
        tag: bytes = b"",
    ) -> dict[int, Head]:
        """Announce an object to all ranks, with as much of it as fits; return the senders' heads.

        Raises ArgumentTypeError on every rank if a sender has failed.
        """
        call = self._first_calls.get((collective, root))
        if call is None:
            rooms = self._mine, self._everyone
            call = self._host.prepare(self._first_request(collective, root, rooms))
            self._first_calls[collective, root] = call
        tail = parcel.tail
        n_bytes, failed = len(tail), failure is not None
        n_large = len(parcel.large)
        _HEAD.pack_into(self._my_view, 0, parcel.n_parts, n_bytes, n_large, failed, tag)
        filled = n_bytes if n_bytes < ROOM else ROOM
        self._my_view[_HEAD.size : _HEAD.size + filled] = tail[:filled]
        self._run(call, timeout_s)
        if failure is not None:
            raise failure
        heads = {}
        for rank in senders:
            start = FIRST_BYTES * rank
            heads[rank] = self._head_of(collective, self._view[start : start + FIRST_BYTES])
        return heads

    def _head_of(self, collective: Collective, row: bytes | memoryview) -> Head:
        """Return the head of a row; raise ArgumentTypeError if its sender has failed."""
        head = Head._make(_HEAD.unpack_from(row))
        if head.has_failed:
            text = bytes(row[_HEAD.size :][: head.tail_bytes]).decode(errors="replace")
            raise ArgumentTypeError(
                f"{collective.spelled} on {rank_of(self._rank, self._world_size)}: another "
                f"rank failed: {text}"
            )
        return head

    def _run(self, call: PreparedCall, timeout_s: float | None) -> None:
        """Run a call that is made repeatedly: as a plan does, if that is possible."""
        if timeout_s is not None or (status := call.run_once()) == _NOT_RUN:
            call.run(timeout_s)
        elif status:
            self._runner.group.raise_for(status)

    def _first_request(
        self, collective: Collective, root: int, rooms: tuple[Bytes, Bytes]
    ) -> Request:
        part_of = PartOf(collective, None, "", 0, (), ())
        source, whole = map(buffer_of, rooms)
        return Request(Collective.ALL_GATHER, source, whole, root=root, part_of=part_of)

    def _room_of(self, rank: int, size_bytes: int) -> bytes:
        """Return the data that a rank has sent in the first round."""
        start = FIRST_BYTES * rank + _HEAD.size
        return bytes(self._view[start : start + size_bytes])

    def _arrival(self, rank: int, head: Head) -> Arrival:
        tail = self._room_of(rank, head.tail_bytes) if head.tail_bytes <= ROOM else b""
        return Arrival(head.n_parts, tail)

    def _spread(
        self,
        collective: Collective,
        root: int,
        number: int,
        data: Bytes | bytes,
        timeout_s: float | None,
    ) -> None:
        """Give all ranks the root's bytes. `data` is their source or destination."""
        part_of = PartOf(collective, None, "", 0, (), (number, len(data)))
        buffer = buffer_of(data)
        source = buffer if self._rank == root else None
        request = Request(Collective.BROADCAST, source, buffer, root=root, part_of=part_of)
        self._host.prepare(request).run(timeout_s)

    def _move(
        self,
        collective: Collective,
        root: int,
        sent: Mapping[int, Bytes | bytes],
        received: dict[int, Bytes],
        timeout_s: float | None,
    ) -> None:
        """Give each rank its bytes. All ranks take part, even those with nothing to send."""
        nothing = b""
        sources = tuple(buffer_of(sent.get(rank, nothing)) for rank in range(self._world_size))
        landing = tuple(buffer_of(received.get(rank, nothing)) for rank in range(self._world_size))
        counts, receive_counts = (
            tuple(buffer.size_bytes for buffer in buffers) for buffers in (sources, landing)
        )
        request = Request(
            Collective.ALL_TO_ALL,
            Buffer(0, (sum(counts),), "uint8", 1, None),
            Buffer(0, (sum(receive_counts),), "uint8", 1, None),
            root=root,
            counts=counts,
            receive_counts=receive_counts,
            sources=sources,
            destinations=landing,
            part_of=PartOf(collective, None, "", 0, (), (-1,)),
        )
        self._host.prepare(request).run(timeout_s)

    def _move_tails(
        self,
        collective: Collective,
        root: int,
        sent: dict[int, bytes],
        arrived: dict[int, Arrival],
        heads: dict[int, Head],
        timeout_s: float | None,
        least: int = ROOM,
    ) -> None:
        """Move the tails that are longer than `least`."""
        received: dict[int, Bytes] = {}
        for rank, arrival in arrived.items():
            if heads[rank].tail_bytes > least:
                arrival.tail = received[rank] = np.empty(heads[rank].tail_bytes, np.uint8)
        self._move(collective, root, sent, received, timeout_s)

    def _move_large(
        self,
        collective: Collective,
        root: int,
        sent: dict[int, list[Bytes]],
        arrived: dict[int, Arrival],
        n_rounds: int,
        timeout_s: float | None,
    ) -> None:
        """Move the large parts: in each round, the next part of every rank."""
        if n_rounds:
            for arrival in arrived.values():
                arrival.make_room()
        for place in range(n_rounds):
            outgoing = {rank: parts[place] for rank, parts in sent.items() if place < len(parts)}
            incoming = {
                rank: arrival.large[place]
                for rank, arrival in arrived.items()
                if place < len(arrival.large)
            }
            self._move(collective, root, outgoing, incoming, timeout_s)


class QuickBroadcast:
    """Broadcasts from one root, of objects that a compiled entry gives and takes if they are small.

    Parameters
    ----------
    mover : ObjectMover
        Moves objects that the entry leaves.
    group : Group
        The ranks.
    entry : callable
        See `gpucoll.entries.objects.object_entry`.
    root : int
        The root.
    """

    def __init__(self, mover: ObjectMover, group: Group, entry: ObjectEntry, root: int) -> None:
        self._mover = mover
        self._group = group
        self._entry = entry
        self._root = root

    def give(self, value: AnyObject) -> AnyObject:
        """Broadcast this rank's object, and return it."""
        mover, failure = self._mover, None
        try:
            data, buffers = pickled(value)
            parcel = parcel_of(data, buffers) if buffers else None
        except Exception as error:  # of any kind: the object's own code may raise
            parcel, failure = mover.failed(Collective.BROADCAST_OBJECT, value, error)
        try:
            if parcel is None:
                found = self._entry(data)
                if found is data:
                    return value
                self._raise_left(found)
                parcel = parcel_of(data, buffers)
            mover.spread(self._root, parcel, failure)
        except BaseException as error:
            self._note(error)
            raise
        return value

    def take(self, value: AnyObject) -> AnyObject:
        """Return the root's object; `value` is ignored."""
        try:
            found = self._entry(None)
            if type(found) is not bytes:
                self._raise_left(found)
                arrival = self._mover.spread(self._root, NOTHING, None)
            elif len(found) == FIRST_BYTES:
                arrival = self._mover.spread_rest(self._root, found)
            else:
                data, arrival = found, None
        except BaseException as error:
            self._note(error)
            raise
        return pickle.loads(data) if arrival is None else arrival.unpack()

    def _raise_left(self, status: Any) -> None:
        """Raise the error of the entry, unless it only left the call to Python."""
        if status != _NOT_RUN:
            self._group.raise_for(status)

    def _note(self, error: BaseException) -> None:
        """Give up the communicator after an interrupt: it is unknown whether the call was made."""
        if not isinstance(error, Exception):
            give_up(self._group, error)
