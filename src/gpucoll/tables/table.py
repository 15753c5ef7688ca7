"""Tables: rows of numbers that all ranks read and update, each at its own pace or in step."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from gpucoll.api.agreement import agree, check_communicator
from gpucoll.api.communicator import Communicator
from gpucoll.arrays.libraries import NUMPY
from gpucoll.arrays.library import AnyArray
from gpucoll.arrays.numpy_arrays import array_at
from gpucoll.arrays.operands import destination_of
from gpucoll.errors import StateError
from gpucoll.tables import saving
from gpucoll.tables.setup import Init, Setup, Staleness, checked_init
from gpucoll.tables.table_state import ROWS_AT_ONCE, TableState, chain
from gpucoll.tables.updates import Update

__all__ = ["Table"]


class Table(TableState):
    """Rows of numbers that all ranks read and update: a parameter server's, without a server.

    ``pull(ids)`` returns rows, ``push(ids, values)`` updates them. On one host the rows lie in
    memory that all ranks share, and both go to it directly. On several hosts each row belongs to
    one of them, whose first rank serves it to the others. Making a table is collective.

    Parameters
    ----------
    comm : Communicator
        The ranks. The table uses it in `clock`, if the mode is "sync", and in `save`; it does not
        close it. Messages between hosts go over a duplicate.
    rows : int
        Number of rows.
    width : int
        Number of elements of a row.
    dtype : dtype
        Their dtype, or its name: any of `gpucoll.types.DTYPES`.
    init : number, array or function, optional
        What is in the rows: a number, a row, an array of all rows, or a function that gets an array
        of ids and returns their rows. Each row is made by one rank only, any of them, so that the
        ranks must pass the same. It is kept: rows that are lost with a host begin anew with it.
        Default: zeros.
    update : str, SGD, Adagrad, ReduceOp or function
        What a push does to a row, element by element. "add" adds the values. "sgd" and "adagrad"
        are ``SGD()`` and ``Adagrad()``. A `ReduceOp` combines the row with the values ("sum" is
        "add"; not avg and scaled_sum). A function gets a row's element and a value and returns the
        new element; Numba compiles it, see `ReduceOp.custom`.
    mode : str or Staleness
        "async": each push is applied at once, and `clock` waits for nobody. "sync": pushes are
        applied by `clock`, of all ranks together, in rank order: the result has the same bits as if
        one process had applied those of rank 0, then those of rank 1, and so on. ``Staleness(s)``:
        each push is applied at once, and `clock` waits until no rank is more than s clocks behind.
        So a pull at clock c sees all pushes of other ranks up to clock c - s - 1, maybe later ones,
        and all of this rank. ``Staleness(0)`` is "sync".

    Attributes
    ----------
    rows, width : int
    dtype : numpy.dtype
    lost_rows : array of int64
        The ids of rows that were lost with their hosts when `kept_for` returned this table, and
        that begin anew.

    Raises
    ------
    ArgumentError, ArgumentTypeError, MismatchError
        On all ranks, if the arguments of one are wrong, or differ. `init` is not compared.
    SharedMemoryError
        On all ranks, if one has no memory.

    Notes
    -----
    A pull takes no lock. Its elements are never torn, but a row may be between two updates, and
    while a rank updates it, some of its elements may be new and others old. (Elements of complex128
    are two of 8 bytes.) Updates of a row exclude each other: none is lost.

    If a rank dies, no row is lost as long as another rank of its host is left: on one host the
    others can pull and push as before. The row that it was updating may be half updated: see
    `torn_rows`. A host that is lost takes its rows with it (`RowsLostError`). Continue by
    ``table.kept_for(comm.shrink())``.

    `pull` and `push` may be called from several threads; `clock` from one.

    Memory: for each row its elements, rounded up to 8 bytes, and 8 bytes; "adagrad" takes the
    elements twice. On several hosts each also has 8 bytes for each row of the table.

    Cost between hosts: a `pull` is one round trip, to all hosts at the same time; a `push` is a
    message to each host that it has rows for, and `flush` a round trip.

    Examples
    --------
    >>> with Table(comm, 100_000, 64, update="adagrad") as table:
    ...     for ids, labels in batches:
    ...         table.push(ids, gradient(table.pull(ids), labels))
    """

    def __init__(
        self,
        comm: Communicator,
        rows: int,
        width: int,
        dtype: Any = "float32",
        *,
        init: Init = None,
        update: Update = "add",
        mode: str | Staleness = "async",
    ) -> None:
        check_communicator(comm)
        setup: Setup | None = None
        problem: Exception | None = None
        try:
            setup = Setup.of(rows, width, dtype, update, mode)
            init = checked_init(init, setup)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            problem = error
        self._enter(comm, setup, problem, init, None)

    # --- calls ------------------------------------------------------------------------------------

    def pull(self, ids: AnyArray, out: AnyArray = None) -> AnyArray:
        """Return rows.

        Parameters
        ----------
        ids : int or array of int
            Numbers of rows, from 0 on, of any shape; an array of any library in host memory, or a
            list. The same id may occur several times.
        out : array, optional
            Where the rows go: an array of the library of `ids`.

        Returns
        -------
        array
            The rows, of shape ``ids.shape + (width,)``, of the library of `ids`. In mode "sync"
            they are those of the last clock; otherwise the present ones, with all pushes of this
            rank.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            An id is no row of the table; nothing was read.
        PeerLostError, DeadlineError
            A host that has rows is lost, or its rank that serves does not answer.
        """
        call = object()
        try:
            self._begin("pull", call)
            places, shape, library, like = self._reader.ids(ids, "pull")
            shape = (*shape, self.width)
            if library is NUMPY and (
                out is None or (self._reader.is_plain(out, shape) and out.flags.writeable)
            ):
                rows = np.empty(shape, self.dtype) if out is None else out
                self._take(places, rows)
                return rows
            dtype = self.dtype if library is NUMPY else self._reader.dtype_name
            template = library.template_of_dtype(dtype, like)._replace(shape=shape)
            destination = destination_of(template, shape, out)
            n_bytes = len(places) * self._row_bytes
            room = array_at(destination.buffer.address, (n_bytes,), np.dtype(np.uint8))
            self._take(places, room)
            return destination.finish()
        finally:
            self._calls.discard(call)

    def push(self, ids: AnyArray, values: AnyArray) -> None:
        """Update rows. Those of other hosts are sent, and have been updated after a `flush`.

        Parameters
        ----------
        ids : int or array of int
            As for `pull`. A row whose id occurs several times is updated several times.
        values : array
            What updates them, of shape ``ids.shape + (width,)`` and of the table's dtype, of any
            library in host memory.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            An id is no row of the table, or the values do not fit; nothing was changed.
        DeadlineError
            A rank that is stopped holds the lock of a row. The rows before it are updated. Or 64
            MiB are on their way to other hosts, and one does not answer.
        PeerLostError
            A host is lost. What is for the others will be applied, by the next call of this rank
            after `kept_for`.
        """
        call = object()
        try:
            self._begin("push", call)
            places, shape, _, _ = self._reader.ids(ids, "push")
            rows, owner = self._reader.values(values, (*shape, self.width))
            if self._setup.is_sync:
                size = (len(places), self._row_bytes)
                copies = places, rows.copy().view(np.uint8).reshape(size)
                with self._lock:  # the list must not be another one before this is in it
                    self._pending.append(copies)
            else:
                self._apply(places, rows)
            del owner
        finally:
            self._calls.discard(call)

    def clock(self) -> int:
        """End a step of this rank; return how many it has ended.

        In mode "sync" this is collective: all ranks' pushes are applied. With ``Staleness(s)`` it
        waits until no rank is more than s clocks behind; for a rank that has closed the table
        nobody waits. In mode "async" it only counts. Between hosts it first waits for this rank's
        pushes, as `flush` does.

        Raises
        ------
        PeerLostError, DeadlineError
            This rank waits, and another one has ended, or does not come. In mode "sync" the pushes
            of this clock may then be applied to some rows and not to others, and are not repeated.
            With ``Staleness(s)`` the step of this rank has ended all the same.
        """
        call = object()
        try:
            self._begin("clock", call)
            if self._setup.is_sync:
                with self._naming_losses():
                    self._exchange()
            else:
                self._flush()
            self._clock = self._rows.members.advance()
            if self._setup.staleness:
                with self._naming_losses() as check:
                    if self._between is not None:
                        self._between.requests.tell_clock(self._clock)
                    self._rows.members.wait_for(self._clock - self._setup.staleness, check)
            return self._clock
        finally:
            self._calls.discard(call)

    def flush(self) -> None:
        """Wait until all pushes of this rank have been applied, on whichever hosts.

        On one host every push has been applied when it returns. `clock` flushes, too.

        Raises
        ------
        PeerLostError, DeadlineError
            A host is lost, or the rank that serves its rows does not answer.
        """
        call = object()
        try:
            self._begin("flush", call)
            self._flush()
        finally:
            self._calls.discard(call)

    def snapshot(self) -> Any:
        """Return all rows as a NumPy array of shape (rows, width); other ranks need not call it.

        Unless the mode is "sync", other ranks may push meanwhile, so that its rows may be from
        different moments.
        """
        call = object()
        try:
            self._begin("snapshot", call)
            whole = np.empty((self.rows, self.width), self.dtype)
            for first in range(0, self.rows, ROWS_AT_ONCE):
                places = np.arange(first, min(first + ROWS_AT_ONCE, self.rows))
                self._take(places, whole[first : first + len(places)])
            return whole
        finally:
            self._calls.discard(call)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the table to a folder. Collective.

        The folder has one table, the last that was saved there; if a save is cut short, that is the
        one before. All pushes are in it, of whatever rank and host, but in mode "sync" not those
        since the last clock. The sums of "adagrad" and the clock are saved, too.

        Parameters
        ----------
        folder : path
            On a file system that all hosts share. It is made if it is not there.

        Raises
        ------
        OSError
            This rank cannot write there; the other ranks raise ArgumentError.

        Notes
        -----
        Each rank writes its share, which must not take longer than the communicator's deadline.
        While another thread pushes, rows are from different moments.
        """
        call = object()
        try:
            self._begin("save", call)
            self._flush()
            facts: dict[str, Any] = {
                **self._setup.settings(),
                "rows": self.rows,
                "width": self.width,
            }
            with self._naming_losses():
                facts["clock"] = min(self._comm.all_gather_object(self._clock))
                saving.write(self._comm, folder, self._owners, self._rows, facts)
        finally:
            self._calls.discard(call)

    @classmethod
    def load(
        cls,
        comm: Communicator,
        folder: str | os.PathLike[str],
        rows: int | None = None,
        width: int | None = None,
        dtype: Any = None,
        *,
        init: Init = None,
        update: Update = "add",
        mode: str | Staleness = "async",
    ) -> Table:
        """Return a table that was saved, on any number of ranks and hosts. Collective.

        Parameters
        ----------
        comm : Communicator
        folder : path
            As for `save`.
        rows, width, dtype : optional
            What the table must have; an error if it has something else. Default: whatever it has.
        init : number, array or function, optional
            What rows become that are lost later, with their host; see `kept_for`.
        update : str, SGD, Adagrad, ReduceOp or function
            The one that it was saved with, maybe with another learning rate.
        mode : str or Staleness
            Any.

        Raises
        ------
        ArgumentError
            The folder has no whole table, or another one than these arguments say.
        """
        check_communicator(comm)
        manifest = saving.read_manifest(comm, folder)
        shape = manifest["rows"], manifest["width"]
        made = cls(comm, *shape, manifest["dtype"], update=update, mode=mode)
        try:
            problem: Exception | None = None
            try:
                given = Setup.of(
                    shape[0] if rows is None else rows,
                    shape[1] if width is None else width,
                    manifest["dtype"] if dtype is None else dtype,
                    update,
                    mode,
                )
                saving.check(given.settings(), manifest, f"{made._who}: {folder}")
                made._init = checked_init(init, given)
            except Exception as error:
                problem = error
            agree(comm, "Table.load", problem, {}, None)
            made._set_clock(manifest["clock"])
            saving.read_rows(comm, folder, manifest, made._owners, made._rows)
        except BaseException:
            made._close(False)
            raise
        return made

    def torn_rows(self) -> Any:
        """Return the ids of rows that may be half updated, since a rank died meanwhile.

        Cost: it reads a word of each row. A row stays in the list, whatever is pushed to it.
        """
        call = object()
        try:
            self._begin("torn_rows", call)
            torn = self._rows.torn()
            return self._owners.owned_by(self._owners.here)[torn] if len(torn) else torn
        finally:
            self._calls.discard(call)

    def _exchange(self) -> None:
        """Send all pushes since the last clock to the ranks that apply them, and apply this one's.

        Each rank applies the pushes to its share of the rows of its host. It gets them in rank
        order, and each rank's in the order in which they were pushed.
        """
        with self._lock:
            pending, self._pending = self._pending, []
        ids = np.concatenate([np.empty(0, np.int64), *(places for places, _ in pending)])
        nothing = np.empty((0, self._row_bytes), np.uint8)
        values = np.concatenate([nothing, *(rows for _, rows in pending)])
        split = self._owners.split(ids)
        ranks = self._owners.shares(split)
        order = np.argsort(ranks, kind="stable")
        counts = np.bincount(ranks, minlength=self._comm.world_size).tolist()
        places = self._comm.all_to_all(split.places[order], send_counts=counts)
        came = self._comm.all_to_all(values[split.order[order]], send_counts=counts)
        self._rows.apply(places, came)
        self._comm.barrier()

    # --- other communicators, and the end ---------------------------------------------------------

    def kept_for(self, comm: Communicator) -> Table:
        """Return this table for the ranks of another communicator, and close this one. Collective.

        After `Communicator.shrink` the ranks that are left call it: all rows are kept but those of
        hosts that are lost (`lost_rows`), and pushes since the last clock, too. After
        `Communicator.grow` the ranks that were there call it, while newcomers make a table with the
        same arguments, which gets the same rows: their `init` is used only for rows that are lost.
        A newcomer begins at the lowest clock of the others. If hosts have come or gone, rows move
        to their new owners. Pushes that other hosts had not applied are made again by the next call
        of this rank.

        If it raises, this table can still be kept for yet another communicator.
        """
        check_communicator(comm)
        call = object()
        problem: StateError | None = None
        try:
            try:
                self._begin("kept_for", call)
            except StateError as error:
                if os.getpid() != self._pid:
                    raise
                problem = error  # the table is closed, which the other ranks must hear
            made = object.__new__(Table)
            made._enter(comm, self._setup, problem, self._init, self)
        finally:
            self._calls.discard(call)
        for each in [*chain(self)]:
            if each is not made:
                each._pending = []
                each._close(False)
        self._next = None
        return made

    def close(self) -> None:
        """Release the table. Closing twice is fine.

        On one host it waits for no rank, and the others can continue. Between hosts it is
        collective: the pushes of this rank are flushed, and each rank waits until the others need
        its rows no more.

        Raises
        ------
        PeerLostError, DeadlineError
            Another host is lost, or late; the table is closed all the same. Not raised again if
            another call has raised it.
        """
        self._close(True)

    def __enter__(self) -> Table:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(kind is None)

    def __repr__(self) -> str:
        return f"Table({self.rows} x {self.width} {self.dtype}, {self._who})"
