"""What a process group of gpucoll can be told: `Options`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpucoll import Compression
from gpucoll.integrations.torch.errors import ArgumentError, ArgumentTypeError


@dataclass(frozen=True)
class Options:
    """Given as ``init_process_group("gpucoll", pg_options=Options(...))``, and to ``new_group``.

    The same on all ranks of a group, but for `device`.

    Attributes
    ----------
    compression : str or gpucoll.Compression, optional
        How large all_reduces of float32 with SUM or AVG travel: "float16", "bfloat16",
        "int8_block", "float8_block". Each element is rounded twice; what is lost is not kept
        (`gpucoll.integrations.torch.CompressedGradients` keeps it, for those of
        DistributedDataParallel).
    compression_from_bytes : int
        From which size on. Default: 1 MiB, so that losses, counts and flags stay exact.
    deterministic : {None, "order"}
        ``"order"``: reductions combine the ranks in their order everywhere, as `gpucoll.init` says.
    bind : bool
        Whether to bind each rank to CPUs of its own, as gpucoll-run does and torchrun does not.
    timeout_s : float, optional
        Deadline of every wait, in seconds. Default: the `timeout` that torch was given (30 min).
    backend : str
        For GPU tensors: "auto", "nccl", "rccl" or "direct".
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
            Compression(self.compression)  # a format that is none is said before ranks meet


def checked(given: object) -> Options:
    """Return what `pg_options` says.

    Raises
    ------
    ArgumentTypeError
        It is another backend's.
    """
    if given is None:
        return Options()
    if not isinstance(given, Options):
        raise ArgumentTypeError(
            "pg_options of backend gpucoll must be gpucoll.integrations.torch.Options(...); got "
            f"{type(given).__module__}.{type(given).__qualname__}"
        )
    return given
