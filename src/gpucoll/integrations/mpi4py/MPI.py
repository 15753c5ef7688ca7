"""The names of mpi4py's `MPI`, over gpucoll.

>>> from gpucoll.integrations.mpi4py import MPI
>>> comm = MPI.COMM_WORLD
>>> comm.Allreduce(MPI.IN_PLACE, x)
"""

# ruff: noqa: F401  # the names are the module

from __future__ import annotations

from typing import Any

from gpucoll.integrations.mpi4py import constants as _constants
from gpucoll.integrations.mpi4py import datatypes as _datatypes
from gpucoll.integrations.mpi4py.absent import FILE_NULL, SESSION_NULL, File, Grequest, Session
from gpucoll.integrations.mpi4py.absent import function_of as _function_of
from gpucoll.integrations.mpi4py.communicator import Comm
from gpucoll.integrations.mpi4py.constants import *  # noqa: F403
from gpucoll.integrations.mpi4py.datatypes import Datatype
from gpucoll.integrations.mpi4py.datatypes import alignment as _typealign
from gpucoll.integrations.mpi4py.datatypes import code_of as _typecode
from gpucoll.integrations.mpi4py.environment import *  # noqa: F403
from gpucoll.integrations.mpi4py.errors import (
    Add_error_class,
    Add_error_code,
    Add_error_string,
    Exception,
    Get_error_class,
    Get_error_string,
    Remove_error_class,
    Remove_error_code,
    Remove_error_string,
)
from gpucoll.integrations.mpi4py.groups import GROUP_EMPTY, GROUP_NULL, Group
from gpucoll.integrations.mpi4py.infos import (
    ERRHANDLER_NULL,
    ERRORS_ABORT,
    ERRORS_ARE_FATAL,
    ERRORS_RETURN,
    INFO_ENV,
    INFO_NULL,
    Errhandler,
    Info,
)
from gpucoll.integrations.mpi4py.intercommunicators import Intercomm
from gpucoll.integrations.mpi4py.intercommunicators import private_of as _commctx_inter
from gpucoll.integrations.mpi4py.intracommunicator import (
    COMM_NULL,
    COMM_SELF,
    COMM_WORLD,
    Compute_dims,
    Intracomm,
)
from gpucoll.integrations.mpi4py.job import job as _job
from gpucoll.integrations.mpi4py.matched import MESSAGE_NO_PROC, MESSAGE_NULL, Message
from gpucoll.integrations.mpi4py.memory import Alloc_mem, Free_mem, Get_address, buffer
from gpucoll.integrations.mpi4py.object_calls import lock_of as _comm_lock
from gpucoll.integrations.mpi4py.object_calls import lock_table as _comm_lock_table
from gpucoll.integrations.mpi4py.object_calls import private_of as _commctx_intra
from gpucoll.integrations.mpi4py.operations import OPERATIONS as _OPERATIONS
from gpucoll.integrations.mpi4py.operations import Op
from gpucoll.integrations.mpi4py.options import rc as _rc
from gpucoll.integrations.mpi4py.options import settle as _settle
from gpucoll.integrations.mpi4py.packing import Aint_add, Aint_diff
from gpucoll.integrations.mpi4py.pickles import Pickle, pickle
from gpucoll.integrations.mpi4py.requests import REQUEST_NULL, Prequest, Request
from gpucoll.integrations.mpi4py.status import Status
from gpucoll.integrations.mpi4py.topologies import Cartcomm, Distgraphcomm, Graphcomm, Topocomm
from gpucoll.integrations.mpi4py.windows import WIN_NULL, Win

memory = buffer


def _set_abort_status(status: int) -> None:
    """Make the end of this process end the job, as `mpi4py.run` requires."""
    _job.abort_status = status


_typedict = _datatypes.TYPE_CODES
globals().update(_datatypes.PREDEFINED)
globals().update(_OPERATIONS)
globals().update({name: value for name, value in vars(_constants).items() if name.isupper()})
del globals()["ERROR_TEXTS"], globals()["ERROR_CLASSES"], globals()["COMBINERS"]

for _kind in [value for value in globals().values() if isinstance(value, type)]:
    if _kind.__module__.startswith(__name__.rpartition(".")[0]):
        _kind.__module__ = __name__

__all__ = [name for name in globals() if not name.startswith("_") and name != "annotations"]


def __getattr__(name: str) -> Any:  # for a type checker also the names that are set above
    found = _function_of(name)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}, and neither has MPI")
    return found


_settle()
if _rc.initialize and not _job.is_initialized:
    _job.begin()
