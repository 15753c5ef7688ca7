"""What a table of several hosts has beside its rows: owners, requests, and the rank that serves."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from gpucoll.errors import AbortedError, PeerLostError
from gpucoll.tables.serving import Pushed, Requests, Server, close_communicator
from gpucoll.wording import list_ranks

if TYPE_CHECKING:
    from gpucoll.api.communicator import Communicator
    from gpucoll.tables.owners import Owners
    from gpucoll.tables.rows import Rows

__all__ = ["RowsLostError", "SeveralHosts", "not_applied"]

Ints: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

CLOSED = 1 << 62
"""The clock of a rank that pushes no more: nobody waits for it."""
_NAMED = 5


class RowsLostError(PeerLostError):
    """A host is lost, and with it the rows of a table that lay in its memory.

    Attributes
    ----------
    lost_rows : array of int64
        The ids of these rows.
    """

    lost_rows: Ints


class SeveralHosts:
    """This rank's part in a table of several hosts. Collective.

    Parameters
    ----------
    comm : Communicator
        The table's ranks; a duplicate of it carries the messages.
    owners : Owners
        The owners of the rows.
    rows : Rows
        The rows of this host.
    row_bytes : int
        The size of a row.
    """

    def __init__(self, comm: Communicator, owners: Owners, rows: Rows, row_bytes: int) -> None:
        self.owners, self.rank, self._rows = owners, comm.rank, rows
        self._comm = comm.duplicate()
        self._server: Server | None = None
        self.was_told = False
        self.requests = Requests(self._comm, owners, rows, row_bytes, rows.members.timeout_s)
        if comm.rank == owners.server(owners.here):
            given = rows, row_bytes, owners.applied, rows.members
            self._server = Server(self._comm, *given)

    def check(self) -> None:
        """Raise what has failed: the thread that serves, or the communicator."""
        if self._server is not None and self._server.error is not None:
            raise self._server.error
        self._comm.check()

    def finish(self) -> None:
        """Wait until no rank needs another one's rows any more. Collective, after a flush."""
        self.requests.tell_clock(CLOSED)
        self._comm.barrier(timeout_s=self.requests.timeout_s)

    def stop(self) -> None:
        """Serve no more. Then what `Owners.applied` says of this host is final."""
        if self._server is not None:
            self._rows.is_over = True  # the thread must not wait for a row's lock
            if not self._server.stop():  # it is in a long loop, or compiles one
                self._rows.memory.is_in_use = True
                self.owners.keep_memory()

    def close(self) -> None:
        """Release everything, without waiting for other ranks. Closing twice does nothing."""
        if not self._comm.is_closed:
            self.stop()
            close_communicator(self._comm)
        self.owners.close()

    @contextlib.contextmanager
    def naming_losses(self) -> Iterator[Callable[[], object]]:
        """Let a `PeerLostError` say which rows are lost with the rank."""
        try:
            self.check()
            yield self.check
        except RowsLostError:
            raise
        except PeerLostError as error:
            self.was_told = True
            raise self._named(error) from error
        except AbortedError:
            self.was_told = True
            raise

    def _named(self, error: PeerLostError) -> PeerLostError:
        found = re.search(r"lost ranks? (\d+)", str(error))
        if found is None:
            return error
        rank, owners = int(found[1]), self.owners
        host = next(host for host, ranks in enumerate(owners.ranks) if rank in ranks)
        others = [other for other in owners.ranks[host] if other != rank]
        how = "Continue by table.kept_for(comm.shrink())"
        if others:
            text = (
                f"The table loses no row as long as one of {list_ranks(others)} of its host is left"
            )
            return PeerLostError(f"{error}. {text}. {how}")
        lost = owners.owned_by(host)
        named = ", ".join(map(str, lost[:_NAMED].tolist())) + (", ..." * (len(lost) > _NAMED))
        made = RowsLostError(
            f"{error}. {len(lost)} of the table's {owners.rows} rows were on its host and are "
            f"lost: {named}. {how}: the others are kept, and these begin anew"
        )
        made.lost_rows = lost
        return made


def not_applied(
    comm: Communicator, hosts_before: list[str], before: SeveralHosts | None
) -> list[tuple[Ints, Bytes]]:
    """Return ids and values of the pushes that other hosts have not applied. Collective.

    Every rank that serves has stopped. Pushes to hosts that are lost are left out: the rows are
    lost, too.

    Parameters
    ----------
    comm : Communicator
        The ranks from now on.
    hosts_before : list of str
        The hosts of the table before; empty if it is new.
    before : SeveralHosts or None
        What this rank had; None if it has joined, or the table was on one host.
    """
    if len(hosts_before) < 2:
        return []
    mine = None
    if before is not None:
        owners = before.owners
        mine = owners.hosts[owners.here], owners.applied.tolist()
    said: dict[str, list[int]] = dict(filter(None, comm.all_gather_object(mine)))
    left: list[Pushed] = []
    if before is not None:
        for host, name in enumerate(before.owners.hosts):
            if host != before.owners.here and name in said:
                left += before.requests.forget(host, said[name][before.rank])
    return [(pushed.ids, pushed.values) for pushed in left]
