"""Groups of calls, and what is left of messages at the end."""

from __future__ import annotations

from contextlib import AbstractContextManager

from gpucoll.api.front import Front
from gpucoll.calls.groups import collected
from gpucoll.errors import MismatchError
from gpucoll.wording import rank_of


class Groups(Front):
    """`Communicator.group`."""

    def group(self, *, timeout_s: float | None = None) -> AbstractContextManager[None]:
        """Collect the calls made inside, and run them together at the end.

        All sends and receives run at once, so that they cannot wait for each other in a circle;
        then the collectives, in order. A call inside returns its output array, which is filled,
        and its errors are raised, at the end. When the block raises, nothing is run. Calls on GPU
        arrays come after those on host arrays, as one group of the vendor's library, which makes
        them at once, in no order: none may use another's output. They are put on their streams at
        the end.

        Parameters
        ----------
        timeout_s : float, optional
            Deadline of the sends and receives, in seconds; a shorter one of a call inside counts.

        Raises
        ------
        StateError
            Groups do not nest.
        ArgumentError
            Calls on GPU arrays in it use each other's output.
        ArgumentTypeError
            Objects, numbers, `probe`, plans, `split` and what asks for counts cannot be inside.

        Examples
        --------
        >>> with comm.group():
        ...     for peer in peers:
        ...         comm.send(mine[peer], peer)
        ...         comm.recv(theirs[peer], peer)
        """
        return collected(self._runner, self._point_to_point.queue, self._gpu, timeout_s)

    def _raise_unreceived(self) -> None:
        """Raise where messages were left behind; called at close."""
        if self._group.failure is not None:
            return  # what broke the communicator was raised, and is why they are there
        who = rank_of(self.rank, self.world_size)
        if left := self._backend.messages.unreceived():
            listed = ", ".join(f"from rank {peer} with tag {tag}" for peer, tag in left[:5])
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise MismatchError(f"{who} closed without receiving messages {listed}{more}")
        if left := self._backend.messages.undelivered():
            listed = ", ".join(f"{count} to rank {peer}" for peer, count in left[:5])
            raise MismatchError(
                f"{who} sent messages that nobody received before closing: {listed}"
            )
