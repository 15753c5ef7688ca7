"""The driver's wait for the ranks of a run to end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import pickle
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from gpucoll.integrations.dask import on_worker
from gpucoll.integrations.dask.on_worker import Order, Station
from gpucoll.integrations.engine.collection import Collection
from gpucoll.integrations.engine.outcome import Outcome, lost, without_result

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["Following"]

_GIVE_UP_S = 5.0
"""How long to wait for ranks that were asked to end, in seconds."""
_LOOKS, _LOOK_AGAIN_S = 20, 0.1
_MOST_TROUBLES = 3
_T = TypeVar("_T")


class Following:
    """A run on workers that have been chosen.

    The driver asks each worker how its rank ended. The worker answers after 20 s at the latest, and
    the driver asks again: so the scheduler keeps no connection for long, and a worker notices if
    its driver is gone.

    Parameters
    ----------
    client : distributed.Client
        The client of the cluster.
    order : Order
        What the workers are given.
    stations : mapping
        The workers by address, in rank order.
    collection : Collection
        Collects the outcomes.
    """

    def __init__(
        self, client: Client, order: Order, stations: Mapping[str, Station], collection: Collection
    ) -> None:
        self._client, self._order, self._stations = client, order, stations
        self._collection = collection
        self._pending: dict[concurrent.futures.Future[Any], str] = {}
        self._lost: set[str] = set()

    def wait(self) -> None:
        """Start all ranks; return when they have ended or have been asked to."""
        try:
            self._begin()
            while self._pending and self._collection.left_s != 0:
                self._take(self._collection.left_s)
        finally:
            self._give_up()

    def _begin(self) -> None:
        begun = self._client.run(
            on_worker.begin, self._order, workers=list(self._stations), on_error="return"
        )
        for address, answer in begun.items():
            if isinstance(answer, Exception):
                self._add(address, answer)
            else:
                self._pending[self._later(self._end_of(address))] = address

    def _take(self, timeout_s: float | None) -> None:
        """Collect the outcomes of the ranks that end in time."""
        done, _ = concurrent.futures.wait(
            self._pending, timeout_s, return_when=concurrent.futures.FIRST_COMPLETED
        )
        for future in done:
            address = self._pending.pop(future)
            self._add(address, future.exception() or future.result())

    def _give_up(self) -> None:
        """Make the workers forget the run, and end the ranks that have not ended."""
        there = [address for address in self._stations if address not in self._lost]
        told = self._later(self._run(on_worker.give_up, there, "ignore"))
        concurrent.futures.wait([told], _GIVE_UP_S)
        for future in (told, *self._pending):
            future.cancel()

    def _add(self, address: str, answer: bytes | BaseException) -> None:
        """Add a rank's outcome: the worker's answer, or why there is none."""
        rank, where = self._order.ranks[address], str(self._stations[address])
        outcome: Outcome
        if isinstance(answer, BaseException):
            how = f"{type(answer).__name__}: {answer}"
            outcome = lost(rank, where, f"was lost with its worker {address} ({how})")
        elif answer == on_worker.UNKNOWN:
            outcome = lost(
                rank, where, f"was lost with its worker {address}: it has been restarted"
            )
        else:
            outcome = self._revived(answer, rank, where)
        if outcome.is_lost and not outcome.kind:
            self._lost.add(address)
        self._collection.add(outcome)

    def _revived(self, data: bytes, rank: int, where: str) -> Outcome:
        try:
            outcome: Outcome = pickle.loads(data)
        except Exception as error:
            how = f"returned a value that cannot be loaded here ({type(error).__name__}: {error})"
            return without_result(rank, where, how)
        return outcome

    # --- in the client's event loop ---------------------------------------------------------------

    def _later(self, coroutine: Coroutine[object, None, _T]) -> concurrent.futures.Future[_T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._client.loop.asyncio_loop)

    async def _run(
        self, function: Callable[..., object], addresses: list[str], on_error: str = "return"
    ) -> dict[str, bytes | Exception | None]:
        answers: dict[str, bytes | Exception | None] = await self._client.run(
            function, self._order.run.name, workers=addresses, on_error=on_error
        )
        return answers

    async def _end_of(self, address: str) -> bytes | Exception:
        """Return the pickled outcome of a worker's rank, or the error if the worker is gone."""
        troubles = 0
        while True:
            answer = (await self._run(on_worker.ended, [address]))[address]
            if isinstance(answer, bytes):
                return answer
            if isinstance(answer, Exception):
                troubles += 1
                if troubles > _MOST_TROUBLES or not await self._stays(address):
                    return answer

    async def _stays(self, address: str) -> bool:
        """Return whether the scheduler still lists a worker that could not be asked."""
        for _ in range(_LOOKS):
            with contextlib.suppress(OSError):
                if address not in await self._client.nthreads():
                    return False
            await asyncio.sleep(_LOOK_AGAIN_S)
        return True
