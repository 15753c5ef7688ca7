"""Start programs of Horovod: `run`, and the command ``horovodrun`` (`launch`)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import gpucoll
from gpucoll.integrations.horovod import alias
from gpucoll.integrations.horovod.runner.hosts import hosts_of, is_local
from gpucoll.integrations.horovod.settings import variable_of

__all__ = ["run"]

_R = TypeVar("_R")
_RENAMED = {"np": "num_proc", "min_np": "min_num_proc", "max_np": "max_num_proc"}
_ELASTIC = (
    "min_num_proc",
    "max_num_proc",
    "reset_limit",
    "cooldown_range",
    "host_discovery_script",
)
_WITHOUT_EFFECT = (
    *("slots", "ssh_port", "ssh_identity_file", "disable_cache", "verbose", "use_gloo", "use_mpi"),
    *("mpi_args", "network_interface", "network_interfaces", "start_timeout"),
)


def run(
    func: Callable[..., _R],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    num_proc: int = 1,
    *,
    hosts: str | None = None,
    hostfile: str | None = None,
    output_filename: str | None = None,
    executable: str | None = None,
    **others: Any,
) -> list[_R]:
    """Call a function on new ranks of this host; return its results in rank order.

    Parameters
    ----------
    func : callable
        Called with `args` and `kwargs`; it calls `init`.
    num_proc : int
        The number of ranks; ``np`` is its older name.
    hosts, hostfile
        Must name this host: `gpucoll.launch` starts no ranks on others.
    **others
        Horovod's other arguments. Those that choose how ranks are started have no effect.

    Raises
    ------
    ValueError
        Other hosts, or elastic ranks: ``horovodrun`` has them.
    Exception
        That of the first rank that failed: see `gpucoll.launch`.
    """
    for old, new in _RENAMED.items():
        if (given := others.pop(old, None)) is None:
            continue
        warnings.warn(f"{old} is deprecated, use {new} instead", DeprecationWarning, 2)
        if new == "num_proc":
            num_proc = given
        else:
            others[new] = given
    if hosts is not None and hostfile is not None:
        raise ValueError("Argument hosts and hostfile only allow one provided.")
    if others.get("use_gloo") and others.get("use_mpi"):
        raise ValueError("Argument use_gloo and use_mpi only allow one set True.")
    if elastic := [name for name in _ELASTIC if others.pop(name, None) is not None]:
        raise ValueError(f"run: {', '.join(elastic)}: elastic ranks are started by horovodrun")
    if unknown := [name for name in others if name not in _WITHOUT_EFFECT]:
        raise TypeError(f"run() got an unexpected keyword argument {unknown[0]!r}")
    if far := [name for name in hosts_of(hosts, hostfile) if not is_local(name)]:
        raise ValueError(f"run: ranks on {', '.join(far)} are started by horovodrun -H")
    if executable is not None or output_filename is not None:
        raise ValueError("run: executable and output_filename are horovodrun's")
    return gpucoll.launch(_called, num_proc, args=(func, tuple(args), dict(kwargs or {})))


def _called(_: object, func: Callable[..., _R], args: Any, kwargs: Any) -> _R:
    os.environ.setdefault(variable_of("HOSTNAME"), "localhost")
    alias.install()
    return func(*args, **kwargs)
