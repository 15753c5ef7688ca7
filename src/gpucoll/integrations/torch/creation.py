"""Create the communicator of a process group from torch's options."""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING

import gpucoll
from gpucoll import GpucollError
from gpucoll.integrations.torch import functional
from gpucoll.integrations.torch.errors import ArgumentError, as_torchs
from gpucoll.integrations.torch.options import checked
from gpucoll.integrations.torch.process_group import ProcessGroup
from gpucoll.integrations.torch.works import seconds

if TYPE_CHECKING:
    import torch.distributed as dist


def create(
    given: dist.distributed_c10d._DistributedBackendOptions, pg_options: object
) -> ProcessGroup:
    """Return a process group for some ranks, which meet through torch's store.

    Parameters
    ----------
    given : torch.distributed._DistributedBackendOptions
        Store, rank, size, timeout and name of the group.
    pg_options : Options or None
        The user's options.

    Raises
    ------
    ArgumentError
        The user named another backend for the same group.
    """
    options = checked(pg_options)
    _check_no_other(given)
    functional.install()
    timeout_s = seconds(given.timeout) if options.timeout_s is None else options.timeout_s
    try:
        comm = gpucoll.init(
            rank=given.group_rank,
            world_size=given.group_size,
            meet=given.store,
            name="torch",
            backend=options.backend,
            device=options.device,
            timeout_s=timeout_s,
            deterministic=options.deterministic,
            bind=options.bind,
        )
    except GpucollError as error:
        raise as_torchs(error) from None
    group = ProcessGroup(comm, given.store, options)
    group.setGroupName(given.group_id)
    return group


def _check_no_other(given: dist.distributed_c10d._DistributedBackendOptions) -> None:
    """Raise if the user named another backend for some kind of device.

    A group written in Python replaces torch's whole group, so every call would go to gpucoll. torch
    does not pass a backend the names of the others, so they are read from the frame of the torch
    function that makes the group.
    """
    others = {device: name for device, name in _backends().items() if name != "gpucoll"}
    if others:
        device, name = next(iter(others.items()))
        raise ArgumentError(
            f"rank {given.group_rank} of {given.group_size}: backend gpucoll must serve a group "
            "alone, cpu and cuda tensors alike, because PyTorch lets a backend written in Python "
            f'replace the whole group; got "{device}:{name}" in addition. Use "gpucoll", and give '
            f'{name} a group of its own: dist.new_group(backend="{name}")'
        )


def _backends() -> dict[str, str]:
    """Return the backend of each kind of device, as torch has parsed the user's string."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    config = None if frame is None else frame.f_locals.get("backend_config")
    return {} if config is None else dict(config.get_device_backend_map())
