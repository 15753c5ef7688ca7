"""Let JAX's collectives between processes go through gpucoll."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import inspect
import os
import secrets
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

import gpucoll
from gpucoll import config
from gpucoll.errors import ArgumentError, BackendUnavailableError, StateError
from gpucoll.integrations.hosts import colour_of_host
from gpucoll.integrations.jax.processes.library import Library, load
from gpucoll.integrations.jax.processes.mpi import VALUES, Functions
from gpucoll.integrations.jax.processes.world import World

if TYPE_CHECKING:
    from gpucoll import Communicator

__all__ = ["leave", "prepare", "use_for_processes"]

_IMPLEMENTATION = "jax_cpu_collectives_implementation"
_AFTER_LOSS_S = 3.0
"""How long it waits if a process is lost: time for those that are left to say that they end."""
_started: Functions | None = None


def use_for_processes(comm: Communicator | None = None) -> None:
    """Let JAX's collectives between processes, on CPUs, go through gpucoll.

    A process is a rank. Call it before the first import of JAX: jaxlib looks for an MPI when it is
    loaded, and never again. It calls ``jax.distributed.initialize``; from then on the program may
    call it, too, and nothing happens if the numbers of process and processes agree.

    Parameters
    ----------
    comm : Communicator, optional
        The processes. It stays the program's own: JAX gets a duplicate. Default: `gpucoll.init`.

    Raises
    ------
    StateError
        JAX is imported already.
    BackendUnavailableError
        jaxlib is not installed, has no MPI implementation of its collectives, or is a version that
        does not fit; or the processor is neither x86-64 nor arm64.

    Notes
    -----
    Collective. Cost: what `gpucoll.init` and ``jax.distributed.initialize`` cost, and 0.2 s to read
    the names that jaxlib needs. Calling it twice does nothing.

    Examples
    --------
    >>> from gpucoll.integrations.jax import use_for_processes
    >>> use_for_processes()
    >>> jax.device_count()  # of all processes
    4
    """
    global _started
    if _started is not None:
        return
    stubs = prepare()
    jax, distributed = (_imported(name) for name in ("jax", "jax._src.distributed"))
    whole = gpucoll.init() if comm is None else comm.duplicate()
    functions = Functions(_world_of(whole))
    functions.fill(stubs)
    jax.config.update(_IMPLEMENTATION, "mpi")
    _initialize(distributed, _address(whole), whole)
    _started = functions
    again = functools.partial(_initialize_again, distributed, whole.rank, whole.world_size)
    for module in (jax.distributed, distributed):
        module.initialize = functools.wraps(distributed.initialize)(again)
    atexit.register(_before_jaxs_end, distributed)


@functools.cache
def prepare() -> Library:
    """Name the library that jaxlib will look for when it is loaded, and return it.

    Raises
    ------
    StateError
        jaxlib is loaded already.
    BackendUnavailableError
        As for `use_for_processes`.
    """
    if any(name.startswith("jaxlib.") for name in sys.modules):
        raise StateError(
            "JAX is imported already, and jaxlib looks for the library of its collectives only "
            "then: call use_for_processes() before the first import of jax, or start the program "
            "by GPUCOLL_JAX=1 gpucoll-run"
        )
    stubs = load(VALUES)
    # What is registered before JAX is imported runs after JAX's end, in which others may still need
    # what this process has started.
    importlib.import_module("gpucoll.api.communicator")
    atexit.register(_release)
    os.environ["MPITRAMPOLINE_LIB"] = str(stubs.path)
    return stubs


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(f"{error}: pip install jax") from None


def _world_of(comm: Communicator) -> World:
    secret = comm.broadcast_object(secrets.token_hex(32) if comm.rank == 0 else None)
    return World(comm, secret, config.timeout_s())


def _address(comm: Communicator) -> str:
    """Return where rank 0 starts JAX's service: on the loopback if all ranks are on one host."""
    is_one_host = comm.all_reduce(colour_of_host(comm), "max") == 0
    found = None
    if comm.rank == 0:
        from gpucoll.topology.interfaces import own_address

        host = "127.0.0.1" if is_one_host else own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as taken:
            taken.bind((host, 0))
            port = taken.getsockname()[1]
        found = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return str(comm.broadcast_object(found))


def _initialize(distributed: Any, address: str, comm: Communicator) -> None:
    wishes = {"cluster_detection_method": "deactivate"}
    known = inspect.signature(distributed.initialize).parameters
    if "heartbeat_timeout_seconds" not in known:  # an old version, which does not know the word
        wishes = {}
    distributed.initialize(
        coordinator_address=address,
        coordinator_bind_address=address,
        num_processes=comm.world_size,
        process_id=comm.rank,
        **wishes,
    )


def _initialize_again(
    distributed: Any,
    rank: int,
    size: int,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *_: Any,
    **__: Any,
) -> None:
    """Stand for ``jax.distributed.initialize``, which has been called already.

    Where the processes meet is known by now, so the address that the program passes is not used.
    """
    if distributed.global_state.client is None:
        raise StateError("jax.distributed was shut down: gpucoll's processes meet once only")
    for name, given, here in (
        ("num_processes", num_processes, size),
        ("process_id", process_id, rank),
    ):
        if given is not None and given != here:
            raise ArgumentError(
                f"jax.distributed.initialize({name}={given}), but gpucoll has started this process "
                f"as rank {rank} of {size}: omit {name}, or start as many ranks"
            )


def _release() -> None:
    """Release everything, after JAX's own end."""
    if _started is not None:
        _started.end()


def leave() -> None:
    """Let the other processes know that this one has failed: whoever waits for it gets an error."""
    _release()


def _before_jaxs_end(distributed: Any) -> None:
    """Do not wait for others if this process has failed; nor long if a process is lost.

    JAX waits for all processes, for minutes, while what they have started goes on.
    """
    if getattr(sys, "last_value", None) is not None:  # an exception that nobody has caught
        leave()
    state = distributed.global_state
    bridge = importlib.import_module("jax._src.xla_bridge")
    if _started is not None and bridge.backends_are_initialized():
        _started.world.process_of_device()  # while JAX can tell
    if _started is None or not _started.has_lost or state.client is None:
        return
    kept = (state.client, state.service)
    ending = threading.Thread(target=_shut_down, args=(distributed,), daemon=True)
    ending.start()
    ending.join(_AFTER_LOSS_S)
    if ending.is_alive():
        for one in kept:  # their destructors would wait, too
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
        state.client = state.service = state.preemption_sync_manager = None


def _shut_down(distributed: Any) -> None:
    with contextlib.suppress(Exception):  # the loss is known
        distributed.shutdown()
