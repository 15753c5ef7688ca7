"""Groups of calls, and the check for messages that were never received."""

from __future__ import annotations

from contextlib import AbstractContextManager

from gpucoll.api.front import Front
from gpucoll.calls.groups import collected, started_together
from gpucoll.errors import MismatchError
from gpucoll.wording import rank_of


class Groups(Front):
    """`Communicator.group`."""

    def group(
        self, *, async_op: bool = False, timeout_s: float | None = None
    ) -> AbstractContextManager[None]:
        """Return a context that collects the calls made in it and runs them together at its end.

        First all sends and receives run at once, so that they cannot deadlock; then the collectives
        run in order. A call inside returns its output array, which is filled at the end of the
        block; errors are raised there, too. If the block raises, none of its calls are run.

        Calls on GPU arrays run after those on host arrays, as one group of the vendor's library. It
        makes them all at once, in no order, so none may use another's output. They are enqueued on
        their streams at the end of the block.

        Parameters
        ----------
        async_op : bool
            Whether to start the calls instead. Each call inside needs ``async_op=True``, too, and
            returns its `Work`. Calls on GPU arrays start together at the end of the block, beside
            the work on the current stream; their works can be used from then on. Calls on host
            arrays are made at once, as outside the block: started messages never wait for each
            other. (With ``mixed=True`` on the communicator they count as calls on GPU arrays.)
        timeout_s : float, optional
            Deadline of the sends and receives, in seconds. A shorter deadline of a call prevails.
            With ``async_op=True``, the deadline of calls on GPU arrays that have none of their own.

        Raises
        ------
        StateError
            Another group is already open: groups do not nest.
        ArgumentError
            Calls on GPU arrays in the group use each other's output, or only one of group and call
            is asynchronous.
        ArgumentTypeError
            The group contains objects, numbers, `probe`, a plan, `split`, or a call that must get
            counts from other ranks.

        Examples
        --------
        >>> with comm.group():
        ...     for peer in peers:
        ...         comm.send(mine[peer], peer)
        ...         comm.recv(theirs[peer], peer)
        >>> with comm.group(async_op=True):
        ...     works = [comm.send(x, right, async_op=True), comm.recv(y, left, async_op=True)]
        >>> for work in works:
        ...     work.wait()
        """
        if async_op:
            return started_together(self._runner, self._gpu, timeout_s)
        return collected(self._runner, self._point_to_point.queue, self._gpu, timeout_s)

    def _raise_unreceived(self) -> None:
        """Raise if messages were never received. Called at close."""
        if self._group.failure is not None or self._group.was_interrupted:
            return  # the error or the interrupt that broke the communicator explains them
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
