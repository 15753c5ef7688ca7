"""The options of a process group of gpucoll."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpucoll import Compression
from gpucoll.integrations.torch.errors import ArgumentError, ArgumentTypeError


@dataclass(frozen=True)
class Options:
    """Options for ``init_process_group("gpucoll", pg_options=Options(...))`` and for ``new_group``.

    All ranks of a group pass the same options; only `device` may differ.

    Attributes
    ----------
    compression : str or gpucoll.Compression, optional
        Format in which large float32 all_reduces with SUM or AVG travel: "float16", "bfloat16",
        "int8_block" or "float8_block". Each element is rounded twice, and no residual is kept. For
        the gradients of DistributedDataParallel, `gpucoll.integrations.torch.CompressedGradients`
        keeps one.
    compression_from_bytes : int
        Smallest size that is compressed. Default: 1 MiB, so that losses, counts and flags stay
        exact.
    deterministic : {None, "order"}
        ``"order"``: reductions combine the ranks in rank order everywhere, as in `gpucoll.init`.
    bind : bool
        Whether to bind each rank to CPUs of its own. gpucoll-run does so, torchrun does not.
    timeout_s : float, optional
        Deadline of every wait, in seconds. Default: torch's `timeout` (30 min).
    backend : str
        For GPU tensors: "auto", "nccl", "rccl", "oneccl" or "direct".
    device : int or str, optional
        This rank's GPU, connected at once. Default: at the first call on a GPU tensor.
    """

    compression: str | Compression | None = None
    compression_from_bytes: int = 1 << 20
    deterministic: str | None = None
    bind: bool = False
    timeout_s: float | None = None
    backend: str = "auto"
    device: Any = None

    def __post_init__(self) -> None:
        least = self.compression_from_bytes
        if isinstance(least, bool) or not isinstance(least, int) or least < 0:
            raise ArgumentError(
                f"compression_from_bytes must be a number of bytes, 0 or more; got {least!r}"
            )
        if isinstance(self.compression, str):
            Compression(self.compression)  # an unknown format is reported before ranks meet


def checked(given: object) -> Options:
    """Return `pg_options` as `Options`, with defaults for None.

    Raises
    ------
    ArgumentTypeError
        `pg_options` belongs to another backend.
    """
    if given is None:
        return Options()
    if not isinstance(given, Options):
        raise ArgumentTypeError(
            "pg_options of backend gpucoll must be gpucoll.integrations.torch.Options(...); got "
            f"{type(given).__module__}.{type(given).__qualname__}"
        )
    return given
