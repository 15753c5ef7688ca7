"""A process group of torch.distributed that runs its calls on a communicator."""

from __future__ import annotations

import datetime
import logging
from typing import TYPE_CHECKING

import torch

import gpucoll
from gpucoll import Communicator, GpucollError
from gpucoll.integrations.torch.block_movements import BlockMovements
from gpucoll.integrations.torch.movements import Movements
from gpucoll.integrations.torch.options import Options
from gpucoll.integrations.torch.reductions import Reductions
from gpucoll.integrations.torch.tensors import Outputs, moved, one
from gpucoll.integrations.torch.works import Work, seconds

if TYPE_CHECKING:
    import torch.distributed as dist

    from gpucoll.integrations.torch.calls import Tensors

_log = logging.getLogger(__name__)
_CPU = torch.device("cpu")
_CLOSING_S = 10.0
"""How many seconds pending operations have when a group is destroyed."""


class ProcessGroup(Reductions, Movements, BlockMovements):
    """The process group that ``init_process_group("gpucoll")`` and ``new_group`` make.

    torch.distributed's functions, DistributedDataParallel and the functional collectives call its
    methods; programs call torch's functions.

    Parameters
    ----------
    comm : Communicator
        The communicator of the group's ranks. The process group owns it from now on.
    store : torch.distributed.Store
        The store through which the ranks met.
    options : Options
        The options from `pg_options`.

    Attributes
    ----------
    comm : Communicator
        The communicator, for calling gpucoll directly on the same ranks.
    """

    def __init__(self, comm: Communicator, store: dist.Store, options: Options) -> None:
        super().__init__(comm, store, options)
        self._name = self._desc = ""

    # --- messages ---------------------------------------------------------------------------------

    def send(self, tensors: Tensors | torch.Tensor, destination: int, tag: int = 0) -> Work:
        """Send one tensor to a rank."""
        x = moved(one(tensors, "send"))
        x = x if x.is_contiguous() else x.contiguous()
        return self._begin([], self.comm.send, x, destination, tag)

    def recv(self, tensors: Tensors | torch.Tensor, source: int, tag: int = 0) -> Work:
        """Receive one tensor from a rank."""
        x = one(tensors, "recv")
        written = Outputs()
        return self._begin(
            [x], self.comm.recv, written.flat(moved(x)), source, tag, written=written
        )

    def recv_anysource(self, tensors: Tensors | torch.Tensor, tag: int = 0) -> Work:
        """Receive one tensor from the first rank that sends one."""
        return self.recv(tensors, gpucoll.ANY_SOURCE, tag)

    # --- what torch reads -------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802
        """Return "gpucoll"."""
        return "gpucoll"

    _get_backend_name = name = getBackendName

    def getRank(self) -> int:  # noqa: N802
        """Return this process's rank in the group."""
        return self.comm.rank

    def getSize(self) -> int:  # noqa: N802
        """Return the number of ranks."""
        return self.comm.world_size

    rank, size = getRank, getSize

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name; torch chooses it."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name."""
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Set the description; torch chooses it."""
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the description."""
        return self._desc

    def get_group_store(self) -> dist.Store:
        """Return the store by which the ranks met."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU, torch.device("cuda")] if torch.cuda.is_available() else [_CPU]

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        if torch.device(device).type not in ("cpu", "cuda"):
            raise RuntimeError(f"backend gpucoll serves cpu and cuda, not {device}")
        return self

    def _set_default_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout_s = seconds(timeout)

    set_timeout = _set_default_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: calls are numbered from the start in any case."""

    def _get_sequence_number_for_group(self) -> int:
        return self.comm.completed

    # --- the end ----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Wait for outstanding calls, and release all resources.

        A receive that no rank answers is given up soon, since a program that destroys a group needs
        nothing more from it.
        """
        try:
            self.comm.close(timeout_s=min(_CLOSING_S, self._timeout_s or _CLOSING_S))
        except GpucollError as error:
            _log.warning(
                "gpucoll: %s ended with an error that was never inspected: %s", self, error
            )

    def abort(self) -> None:
        """Abort the group: every rank gets an error, now or at its next call."""
        self.comm.abort()
        self.shutdown()

    def __repr__(self) -> str:
        return f"<gpucoll process group {self._name!r}, rank {self.rank()} of {self.size()}>"
