"""From what torch says of a group to its communicator."""

from __future__ import annotations

from typing import Any

import gpucoll
from gpucoll import GpucollError
from gpucoll.integrations.torch import functional
from gpucoll.integrations.torch.errors import as_torchs
from gpucoll.integrations.torch.options import checked
from gpucoll.integrations.torch.process_group import ProcessGroup
from gpucoll.integrations.torch.works import seconds


def create(given: Any, pg_options: Any) -> ProcessGroup:
    """Return the process group of some ranks, which meet by torch's store.

    Parameters
    ----------
    given : torch.distributed._DistributedBackendOptions
        Store, rank, size, timeout and name of the group.
    pg_options : Options or None
        What the user said.
    """
    options = checked(pg_options)
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
