"""What distinguishes one vendor's collectives library from the other's, with NVIDIA's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from gpucoll import config
from gpucoll.backends.nccl.prototypes import PROTOTYPES
from gpucoll.devices.foreign_library import Prototype

Version = tuple[int, int, int]


class Vendor(NamedTuple):
    """A vendor's collectives library."""

    name: str
    """Its common name; in lower case the backend's name."""
    device_kind: str
    """The kind of GPUs that it serves, as in a Buffer's ``device``."""
    variable: str
    """The environment variable that names a copy."""
    pattern: str
    """Matches the file name of any copy."""
    wheels: tuple[str, ...]
    """Where Python packages keep their copies: patterns of paths, searched on Python's path."""
    file_names: tuple[str, ...]
    """File names for the loader, in this order."""
    minimum: Version
    """The oldest version that is accepted."""
    prototypes: tuple[Prototype, ...]
    spellings: Mapping[str, Sequence[str]]
    """Name in the table -> the symbols to look for, if there are several."""
    remedy: str
    """What to do if there is no library."""
    variables_to_mention: Mapping[str, str]
    """Environment variable -> the note to print if it is set."""
    variables_to_set: Mapping[str, str]
    """Environment variable that should be 1 -> the note to print if it is not."""


BLOCKING = (
    "it overrides how gpucoll makes communicators, so that a rank that never comes may not end in "
    "a DeadlineError: unset it"
)


NCCL = Vendor(
    name="NCCL",
    device_kind="cuda",
    variable=config.NCCL_LIBRARY,
    pattern=r"libnccl\.so(\.2.*)?",
    wheels=("nvidia/nccl/lib/libnccl.so.2",),
    file_names=("libnccl.so.2",),
    # 2.18 introduced ncclCommSplit, and is the first version with the complete prefix.
    minimum=(2, 18, 0),
    prototypes=PROTOTYPES,
    spellings=MappingProxyType({}),
    remedy="pip install nvidia-nccl-cu12 (or nvidia-nccl-cu13 for CUDA 13: never both, they "
    "overwrite each other), or name a copy in " + config.NCCL_LIBRARY,
    variables_to_mention=MappingProxyType({config.NCCL_COMM_BLOCKING: BLOCKING}),
    variables_to_set=MappingProxyType({}),
)
