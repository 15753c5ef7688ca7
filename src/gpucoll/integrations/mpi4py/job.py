"""The processes of the job: how they begin and end, and the predefined communicators."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import gpucoll
from gpucoll import GpucollError, config
from gpucoll.integrations.mpi4py.constants import THREAD_MULTIPLE
from gpucoll.integrations.mpi4py.errors import as_mpis
from gpucoll.integrations.mpi4py.options import rc
from gpucoll.integrations.mpi4py.state import State, close_all

if TYPE_CHECKING:
    from gpucoll import Communicator

_IDLE_S = 86_400.0
"""The default deadline of a call, in seconds. Programs for MPI expect to wait without limit."""


class Job:
    """This process's membership in the job."""

    def __init__(self) -> None:
        self.is_initialized = self.is_finalized = False
        self.thread_level = THREAD_MULTIPLE
        self.main_thread = 0
        self.world = State(_not_yet, (), 0, "world")
        self.self = State(self._alone, (0,), 0, "self")
        self.world.name, self.self.name = "MPI_COMM_WORLD", "MPI_COMM_SELF"
        self.world.is_predefined = self.self.is_predefined = True
        self.abort_status = 0
        """The exit code with which the end of this process ends the job; 0 lets the others
        continue."""
        self.attached: Any = None
        """The program's buffer for buffered sends."""
        self.service: Any = None
        """A communicator for this library's own messages, which no receive of the program can
        match."""
        self.service_lock = threading.Lock()

    def begin(self) -> None:
        """Join the other processes."""
        if self.is_initialized:
            raise as_mpis(gpucoll.StateError("MPI is initialized already, or was finalized"))
        try:
            comm = gpucoll.init(
                backend=rc.backend, device=rc.device, timeout_s=waiting_s(), name="mpi4py"
            )
            self.service = comm.duplicate() if comm.world_size > 1 else comm
        except GpucollError as error:
            raise as_mpis(error) from None
        world = self.world
        world._make = lambda: comm
        world.ranks = tuple(range(comm.world_size))
        world.rank, world.size = comm.rank, comm.world_size
        self.self.ranks = (comm.rank,)
        self.is_initialized = True
        self.main_thread = threading.get_ident()
        if rc.finalize is not False:
            atexit.register(self._end_at_exit)

    def end(self) -> None:
        """Wait for the other processes, and release everything."""
        if not self.is_initialized or self.is_finalized:
            raise as_mpis(gpucoll.StateError("MPI is not initialized, or was finalized already"))
        for keyval in list(self.self.attributes):
            self.self.attributes.pop(keyval, None)
        with contextlib.suppress(GpucollError):
            self.world.comm.barrier()
        self.is_finalized = True
        service, self.service = self.service, None
        world_comm = self.world.comm
        if service is not None and service is not world_comm:
            with contextlib.suppress(GpucollError):
                service.close()
        close_all()

    def abort(self, code: int, state: State | None = None) -> NoReturn:
        """End this process and the job: other ranks' calls raise, and a launcher ends them."""
        sys.stdout.flush()
        print(f"MPI.Abort({code}) on rank {self.world.rank} of {self.world.size}", file=sys.stderr)
        sys.stderr.flush()
        for broken in (state, self.world):
            if broken is not None and self.is_initialized and not self.is_finalized:
                with contextlib.suppress(GpucollError):
                    broken.comm.abort()
        os._exit(code & 255)

    def _end_at_exit(self) -> None:
        """Finalize as MPI does, but do not wait if an exception ends this process."""
        if self.is_finalized or os.getpid() != _process:
            return
        if getattr(sys, "last_value", None) is not None:
            return  # gpucoll notifies the other ranks
        if self.abort_status:
            self.abort(self.abort_status)
        self.end()

    def _alone(self) -> Communicator:
        if self.is_finalized:
            raise gpucoll.StateError("MPI was finalized")
        return gpucoll.init(
            rank=0, world_size=1, timeout_s=waiting_s(), backend=rc.backend, name="mpi4py self"
        )


def _not_yet() -> NoReturn:
    raise gpucoll.StateError("MPI is not initialized: call MPI.Init() first")


def waiting_s() -> float:
    """Return the deadline of every wait, in seconds, from rc or else from the environment."""
    if rc.timeout_s is not None:
        return float(rc.timeout_s)
    named = config.variable(config.TIMEOUT_S)
    return float(named) if named else _IDLE_S


_process = os.getpid()
job = Job()
