"""GPU memory that all ranks of a host can read, and the words by which they wait for each other.

Each rank contributes an exchange: memory of its own GPU, outside of every pool, exported once and
opened by all others. The words lie in one page of host memory that every rank page-locks. The GPUs
write them and wait for them; the host can raise them when a call is given up.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from gpucoll import devices
from gpucoll.backends.direct import schedule, word_trial
from gpucoll.backends.direct.peer_trial import TRIAL_BYTES, PeerTrial
from gpucoll.backends.direct.rounds import ALIGNMENT_BYTES, Exchange, Rounds, Word, value_of
from gpucoll.backends.direct.schedule import Schedule
from gpucoll.devices import Device
from gpucoll.errors import BackendUnavailableError, GpucollError
from gpucoll.topology.processes import process_of
from gpucoll.transport.shared import mapping
from gpucoll.transport.shared.mapping import Mapping

HALF_BYTES: Final = 8 << 20
"""The most that one round moves through an exchange. Chosen by reasoning, not measured: so large
that waiting is short compared with moving, and small enough for ranks that share a GPU."""
HOST_HALF_BYTES: Final = 2 << 20
"""The same for a Host device: a round stays in a CPU's caches and costs hardly a launch."""
MOST_RANKS: Final = 16
"""The most ranks whose memory one kernel combines."""

_PAGE: Final = 4096
_LINE: Final = 64
_LET_GO: Final = 8
_SPARE: Final = 16
"""Place in each rank's line, which has READY, DONE, the word above, and then this unused one."""
_TOKEN_AT: Final = _PAGE - 32
_PAUSE_S: Final = 1e-3

Gather = Callable[[bytes], list[bytes]]
"""Distributes this rank's bytes and returns those of all ranks, by rank; every rank calls it."""


class PeerMemory:
    """One rank's view of the exchanges and words of all ranks of a host.

    Made by `connect`. Its attributes are those of `gpucoll.backends.direct.peer.Memory`.
    """

    reaches_all = True

    def __init__(self, device: Device, rank: int, world_size: int, half_bytes: int) -> None:
        self.device = device
        self.exchange = Exchange(rank, world_size, (), half_bytes)
        self._own = 0
        self._trial: PeerTrial | None = None
        self._opened: list[int] = []
        self._page: Mapping | None = None
        self._fd = -1
        self._seen = 0
        self.schedule = Schedule(False, (), "")
        self.wraps = device.kind != "rocm"  # HIP compares numbers, CUDA their difference
        self._processes: list[int] = []
        """Process ids of the ranks: a process that has ended uses no memory."""

    # --- words ------------------------------------------------------------------------------------

    def word(self, rank: int, word: Word) -> int:
        """Return the address of a rank's word, as the GPU sees it."""
        return self._seen + rank * _LINE + 4 * word

    def value_of(self, word: Word, number: int, before: int) -> int:
        """Return the value of a call's number, after `before` rounds of earlier calls."""
        return value_of(word, number, before)

    def begin(self, made: Rounds, before: int) -> None:
        """Do nothing: the host has no part in a call."""

    def restart(self) -> None:
        """Do nothing: other ranks know the numbers."""

    def raise_words(self, word: Word, value: int) -> None:
        """Write a word of every rank from the host, so that no stream waits for it any more."""
        for rank in range(self.exchange.world_size):
            self._host_word(rank * _LINE + 4 * word).value = value

    def _host_word(self, offset: int) -> ctypes.c_uint32:
        assert self._page is not None
        return ctypes.c_uint32.from_address(self._page.address + offset)

    @property
    def trial(self) -> int:
        """Memory in which this rank may try a kernel: after the halves, not visible to others."""
        return self._own + 2 * self.exchange.half_bytes

    # --- connecting -------------------------------------------------------------------------------

    def offer(self) -> dict[str, Any]:
        """Make this rank's part; return the facts that the others need."""
        device, exchange = self.device, self.exchange
        if not device.can_wait_for_values:
            raise BackendUnavailableError(f"streams of {device.label} cannot wait for words")
        self._own = device.allocate(2 * exchange.half_bytes + TRIAL_BYTES)
        exported = device.export_memory(self._own)
        if exported is None:
            raise BackendUnavailableError(f"memory of {device.label} cannot be exported")
        self._trial = PeerTrial(device, self.trial)
        made = {
            "written": self.write_token(),
            "kind": device.kind,
            "uuid": device.identity.uuid,
            "process": os.getpid(),
            "handle": exported.handle.hex(),
            "offset": exported.offset,
        }
        if exchange.rank == 0:
            self._fd = mapping.create("gpucoll peer words", _PAGE, reserve_bytes=_PAGE)
            token = secrets.token_bytes(16)
            os.pwrite(self._fd, token, _TOKEN_AT)
            made |= {"page": f"/proc/{os.getpid()}/fd/{self._fd}", "token": token.hex()}
        return made

    def write_token(self) -> str:
        """Write a new token to the beginning of this rank's exchange; return it for the others."""
        assert self._trial is not None
        return self._trial.write(self._own).hex()

    def read_tokens(self, tokens: Sequence[str]) -> None:
        """Raise BackendUnavailableError if this rank's GPU does not read the others' tokens."""
        assert self._trial is not None
        for rank, (at, token) in enumerate(zip(self.exchange.addresses, tokens, strict=True)):
            is_own = rank == self.exchange.rank
            if not (is_own or self._trial.is_read(at, bytes.fromhex(token))):
                raise BackendUnavailableError(
                    f"{self.device.label} does not read what rank {rank}'s GPU has written in its "
                    "memory, though the driver says that it can: the link between them is broken "
                    "(on many machines IOMMU or PCIe ACS must be off for it)"
                )

    def write_to_next(self) -> str:
        """Write a new token into the exchange of the ring's next rank; return it for that rank."""
        exchange = self.exchange
        assert self._trial is not None
        return self._trial.write(exchange.addresses[exchange.following]).hex()

    def read_from_previous(self, tokens: Sequence[str]) -> None:
        """Raise BackendUnavailableError if the ring's previous rank has not written here."""
        previous = self.exchange.around[self.exchange.place - 1]
        assert self._trial is not None
        if not self._trial.is_read(self._own, bytes.fromhex(tokens[previous])):
            raise BackendUnavailableError(
                f"{self.device.label} does not find what rank {previous}'s GPU has written in its "
                "memory, as a ring needs: the link between them is broken (on many machines IOMMU "
                "or PCIe ACS must be off for it); direct_schedule='shares' only reads"
            )

    def end_trial(self) -> None:
        """Release the trial's resources; a GPU that no longer responds keeps everything."""
        if self._trial is None:
            return
        with contextlib.suppress(GpucollError):
            self._trial.close()
        if self._trial.is_stuck or word_trial.is_stuck(
            self.device
        ):  # freeing memory that a GPU uses waits for the GPU
            _stuck.append((self._trial, self._page, self._own, self._opened))
            self._page, self._own, self._opened = None, 0, []

    def open(self, offers: Sequence[dict[str, Any]]) -> None:
        """Open the exchanges of the others."""
        self._check(offers)
        self._processes = [offer["process"] for offer in offers]
        self._open_page(offers[0]["page"], bytes.fromhex(offers[0]["token"]))
        addresses = []
        for rank, offer in enumerate(offers):
            if rank == self.exchange.rank:
                addresses.append(self._own)
                continue
            base = self.device.open_exported(bytes.fromhex(offer["handle"]))
            self._opened.append(base)
            addresses.append(base + offer["offset"])
        if any(address % ALIGNMENT_BYTES for address in addresses):
            raise BackendUnavailableError(f"{self.device.label}: memory that is not aligned")
        self.exchange = self.exchange._replace(addresses=tuple(addresses))
        self.read_tokens([offer["written"] for offer in offers])

    def _check(self, offers: Sequence[dict[str, Any]]) -> None:
        kinds = sorted({offer["kind"] for offer in offers})
        if len(kinds) > 1:
            raise BackendUnavailableError(f"the ranks' GPUs are of several kinds: {kinds}")
        if len({offer["process"] for offer in offers}) < len(offers):
            # Streams of one process may share a queue of the GPU: a waiting stream would block the
            # very stream that it waits for.
            raise BackendUnavailableError("some ranks share a process")
        for rank, offer in enumerate(offers):
            number = _number_of(self.device, offer["uuid"])
            if number is not None and not self.device.can_access(number):
                raise BackendUnavailableError(
                    f"{self.device.label} does not read the memory of rank {rank}'s GPU, "
                    f"{self.device.kind}:{number} here"
                )

    def _open_page(self, path: str, token: bytes) -> None:
        fd = self._fd if self.exchange.rank == 0 else os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._fd = fd
        # In another PID namespace the path may name another file.
        if os.pread(fd, len(token), _TOKEN_AT) != token:
            raise BackendUnavailableError("rank 0's shared memory cannot be reached from here")
        self._page = Mapping(fd, _PAGE, "words of ranks' GPUs")
        self._seen = self.device.register_host(self._page.address, _PAGE)
        spare = self.exchange.rank * _LINE + _SPARE
        problem = word_trial.problem_at(self.device, self._seen + spare, self._page.address + spare)
        if problem:
            raise BackendUnavailableError(f"{self.device.label}: {problem}")

    def close_file(self) -> None:
        """Close the words' file: all ranks have mapped it, or never will."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # --- letting go -------------------------------------------------------------------------------

    def close_peers(self) -> None:
        """Close the others' exchanges: nothing here uses them any more."""
        while self._opened:
            with contextlib.suppress(GpucollError):  # a GPU that has failed frees nothing
                self.device.close_exported(self._opened.pop())

    def free(self) -> None:
        """Free this rank's part: no rank uses it any more."""
        with contextlib.suppress(GpucollError):
            if self._own:
                self.device.free(self._own)
        self._own = 0
        self._let_page_go()

    def abandon(self) -> None:
        """Release the page; this rank's memory stays, because others may use it."""
        self._let_page_go()

    def _let_page_go(self) -> None:
        self.close_file()
        if self._page is not None:
            if self._seen:
                with contextlib.suppress(GpucollError):
                    self.device.unregister_host(self._page.address)
            self._page.unmap()
        self._page, self._seen = None, 0

    def close(self, limit_s: float) -> bool:
        """Release everything, after all other ranks have released this one's exchange.

        Nothing of this rank is under way. If other ranks, which may still run, do not release it
        within `limit_s`, the exchange stays until they do. The next communicator that connects or
        closes checks that. Freeing it earlier would break the GPU of a rank that reads it.

        Returns
        -------
        bool
            Whether the exchange was freed.
        """
        _free_left()
        self.close_peers()
        if self._page is None:  # already closed
            return not self._own
        self._host_word(self.exchange.rank * _LINE + _LET_GO).value = 1
        due_s = time.monotonic() + limit_s
        while not self._is_let_go():
            if time.monotonic() > due_s:
                _left.append((os.getpid(), self))
                return False
            time.sleep(_PAUSE_S)
        self.free()
        return True

    def _is_let_go(self) -> bool:
        """Return whether no rank uses this rank's exchange any more."""
        return self._page is None or all(
            self._host_word(rank * _LINE + _LET_GO).value or _has_ended(process)
            for rank, process in enumerate(self._processes)
        )


_stuck: list[tuple[PeerTrial, Mapping | None, int, list[int]]] = []
"""Resources of trials on GPUs that no longer respond."""
_left: deque[tuple[int, PeerMemory]] = deque()
"""Memory that others had not released, with the process that owns it: a child must not free it."""


def _free_left() -> None:
    """Free memory that no rank uses any more."""
    for _ in range(len(_left)):
        try:
            process, memory = _left.popleft()
        except IndexError:  # another thread does the same
            return
        if process != os.getpid():
            continue
        if memory._is_let_go():
            memory.free()
        else:
            _left.append((process, memory))


def _has_ended(process: int) -> bool:
    """Return whether a process of this host has ended, even if its parent has not reaped it."""
    found = process_of(process)
    return not os.path.exists(f"/proc/{process}") if found is None else found.has_ended


def _number_of(device: Device, uuid: str) -> int | None:
    """Return the number of a GPU in this process; None if this process does not see it."""
    if uuid == device.identity.uuid:
        return device.number
    for number in range(devices.device_count(device.kind)):
        if devices.open_device(device.kind, number).identity.uuid == uuid:
            return number
    return None


def connect(
    device: Device,
    rank: int,
    world_size: int,
    gather: Gather,
    half_bytes: int = 0,
    wish: str = "auto",
) -> PeerMemory:
    """Make and open the exchanges of all ranks, which are on one host; every rank calls it.

    `half_bytes` and `wish`, the schedule to use, are the same on all ranks. `half_bytes` 0: the
    default for the kind of device.

    Raises
    ------
    BackendUnavailableError
        It is not possible; all ranks raise the same reason. Nothing is left behind.
    """
    _free_left()
    suiting = HOST_HALF_BYTES if device.kind == "host" else HALF_BYTES
    memory = PeerMemory(device, rank, world_size, half_bytes or suiting)
    if world_size > MOST_RANKS:
        raise BackendUnavailableError(
            f"{world_size} ranks: at most {MOST_RANKS} read each other's GPU memory"
        )
    try:
        offers = _agree(gather, memory.offer)
        _agree(gather, partial(memory.open, offers))
        tokens = _agree(gather, memory.write_token)
        _agree(gather, partial(memory.read_tokens, tokens))
        memory.schedule = schedule.agree(device, rank, wish, gather)
        if memory.schedule.is_ring:
            memory.exchange = memory.exchange._replace(ring=memory.schedule.around)
            tokens = _agree(gather, memory.write_to_next)
            _agree(gather, partial(memory.read_from_previous, tokens))
        memory.end_trial()
    except BackendUnavailableError:
        memory.end_trial()
        memory.close_peers()
        try:
            gather(b"")  # freeing memory that another rank still has open breaks that rank's GPU
        except BaseException:
            memory.abandon()
            raise
        memory.free()
        raise
    except BaseException:
        memory.end_trial()
        memory.close_peers()
        memory.abandon()
        raise
    memory.close_file()
    return memory


def _agree(gather: Gather, attempt: Callable[[], Any]) -> list[Any]:
    """Return the results of all ranks' attempts; raise on all ranks if one of them failed."""
    answer: dict[str, Any] = {"made": None, "problem": ""}
    try:
        answer["made"] = attempt()
    except (GpucollError, MemoryError, OSError) as error:
        answer["problem"] = str(error) or type(error).__name__
    answers = [json.loads(each) for each in gather(json.dumps(answer).encode())]
    problems = [
        f"rank {at}: {each['problem']}" for at, each in enumerate(answers) if each["problem"]
    ]
    if problems:
        raise BackendUnavailableError("; ".join(problems))
    return [each["made"] for each in answers]
