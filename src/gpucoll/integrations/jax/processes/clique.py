"""A communicator of XLA's: several devices, some of which may belong to one process."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from gpucoll.errors import DeadlineError, MismatchError
from gpucoll.integrations.native import Door, door_of

if TYPE_CHECKING:
    from gpucoll import Communicator, Work

__all__ = ["Clique"]

Array: TypeAlias = "np.ndarray[Any, Any]"
_COMBINE = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


class _Call(NamedTuple):
    """What the devices of one process must have in common."""

    name: str
    op: str
    n_items: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.name}({self.n_items} of {self.dtype}{self.op and ', ' + self.op})"


class _Meeting:
    """A call that waits for the devices of this process."""

    def __init__(self, call: _Call) -> None:
        self.call = call
        self.arrays: dict[int, tuple[Array, Array]] = {}
        self.is_ended = False
        self.error: BaseException | None = None


class Clique:
    """The devices of one communicator of XLA's, and gpucoll's communicator of their processes.

    Devices of one process meet in its memory. The last one that comes makes the call for all.

    Parameters
    ----------
    owners : sequence of int
        The process of each device, in order of the devices' places.
    mine : int
        This process.
    connect : callable
        Returns a communicator of the processes that it is given, in their order. It is called once,
        when the communicator is first needed.
    timeout_s : float
        How long devices of one process wait for each other.
    """

    def __init__(
        self,
        owners: Sequence[int],
        mine: int,
        connect: Callable[[Sequence[int]], Communicator],
        timeout_s: float,
    ) -> None:
        self.size = len(owners)
        self.processes = list(dict.fromkeys(owners))
        self.rank_of = [self.processes.index(owner) for owner in owners]
        """The rank of each device's process."""
        self._places = [
            [place for place, owner in enumerate(owners) if owner == process]
            for process in self.processes
        ]
        self._mine = self._places[self.processes.index(mine)]
        self._connect = functools.partial(connect, self.processes)
        self._timeout_s = timeout_s
        self._comm: Communicator | None = None
        self._connecting = threading.Lock()
        self._changed = threading.Condition()
        self._meeting: _Meeting | None = None

    @property
    def is_one_each(self) -> bool:
        """Whether each device has a process of its own; its place is then the process's rank."""
        return len(self.processes) == self.size

    @property
    def comm(self) -> Communicator:
        """The communicator of the processes, made when it is first needed."""
        if self._comm is None:
            with self._connecting:
                if self._comm is None:
                    self._comm = self._connect()
        return self._comm

    @property
    def door(self) -> Door:
        """What compiled code calls; made by all processes, when it is first needed."""
        door = door_of(self.comm)
        # An interrupt would be raised in the callback that takes the error: mpi.py passes it on.
        door.words.main_thread = 0
        return door

    # --- collectives ------------------------------------------------------------------------------

    def all_reduce(self, place: int, x: Array, out: Array, op: str) -> None:
        """Combine x of all devices into out."""
        self._meet(place, _Call("all_reduce", op, x.size, x.dtype.name), (x, out))

    def all_gather(self, place: int, x: Array, out: Array) -> None:
        """Put x of all devices into out, one after the other."""
        self._meet(place, _Call("all_gather", "", x.size, x.dtype.name), (x, out))

    def reduce_scatter(self, place: int, x: Array, out: Array, op: str) -> None:
        """Combine x of all devices, and put the block of this place into out."""
        self._meet(place, _Call("reduce_scatter", op, x.size, x.dtype.name), (x, out))

    def send(self, place: int, x: Array, to: int) -> Work[Any]:
        """Start to send x to the device at place `to`."""
        tag = place * self.size + to
        return self.comm.send(x, self.rank_of[to], tag, async_op=True)

    def receive(self, place: int, out: Array, source: int) -> Work[Any]:
        """Start to receive out from the device at place `source`."""
        tag = source * self.size + place
        return self.comm.recv(out, self.rank_of[source], tag, async_op=True)

    # --- devices of one process -------------------------------------------------------------------

    def _meet(self, place: int, call: _Call, arrays: tuple[Array, Array]) -> None:
        if len(self._mine) == 1:
            self._run(call, [arrays])
            return
        meeting, is_complete = self._joined(place, call, arrays)
        if is_complete:
            try:
                self._run(call, [meeting.arrays[place] for place in self._mine])
            except BaseException as error:
                meeting.error = error
            with self._changed:
                meeting.is_ended = True
                self._changed.notify_all()
        if meeting.error is not None:
            raise meeting.error

    def _joined(
        self, place: int, call: _Call, arrays: tuple[Array, Array]
    ) -> tuple[_Meeting, bool]:
        """Return the call in which this device takes part, and whether this device is to run it.

        If it is not, the call has ended when this returns.
        """
        with self._changed:
            if self._meeting is None:
                self._meeting = _Meeting(call)
            meeting = self._meeting
            meeting.arrays[place] = arrays
            if meeting.call != call:
                self._fail(
                    meeting,
                    MismatchError(f"devices of one process differ: {meeting.call} and {call}"),
                )
            elif len(meeting.arrays) == len(self._mine):
                self._meeting = None
                return meeting, True
            until = time.monotonic() + self._timeout_s
            while not meeting.is_ended:
                self._changed.wait(max(until - time.monotonic(), 0))
                is_waiting = meeting is self._meeting
                if is_waiting and time.monotonic() >= until:
                    missing = sorted({*self._mine} - meeting.arrays.keys())
                    text = f"{call}: devices at places {missing}, of this process, did not come "
                    self._fail(meeting, DeadlineError(f"{text}within {self._timeout_s:g} s"))
            return meeting, False

    def _fail(self, meeting: _Meeting, error: Exception) -> None:
        meeting.error, meeting.is_ended, self._meeting = error, True, None
        self._changed.notify_all()

    def _run(self, call: _Call, arrays: list[tuple[Array, Array]]) -> None:
        """Make a call with the arrays of all devices of this process."""
        (_, first), *others = arrays
        inputs = [x for x, _ in arrays]
        if call.name == "all_gather":
            self._gather(inputs, first)
        elif call.name == "all_reduce":
            self._reduce(self._combined(inputs, call.op), call.op, first)
        else:
            total = np.empty_like(inputs[0])
            self._reduce(self._combined(inputs, call.op), call.op, total)
            for place, (_, out) in zip(self._mine, arrays, strict=True):
                out[...] = total[place * out.size : (place + 1) * out.size]
            return
        for _, out in others:
            out[...] = first

    def _combined(self, inputs: list[Array], op: str) -> Array:
        if len(inputs) == 1:
            return inputs[0]
        with np.errstate(all="ignore"):
            return functools.reduce(_COMBINE[op], inputs[1:], inputs[0])

    def _reduce(self, x: Array, op: str, out: Array) -> None:
        if len(self.processes) == 1:
            out[...] = x
        else:
            self.comm.all_reduce(x, op, out=out)

    def _gather(self, inputs: list[Array], out: Array) -> None:
        most = max(map(len, self._places))
        blocks = out.reshape(self.size, -1)
        given = np.zeros((most, blocks.shape[1]), out.dtype)
        for block, x in zip(given, inputs, strict=False):
            block[...] = x
        got = self.comm.all_gather(given) if len(self.processes) > 1 else given
        for places, part in zip(self._places, got.reshape(-1, *given.shape), strict=True):
            blocks[places] = part[: len(places)]

    def close(self) -> None:
        """Release the communicator."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.close()
