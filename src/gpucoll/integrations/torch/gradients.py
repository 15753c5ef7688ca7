"""Compressed gradients for DistributedDataParallel, with error feedback."""
# No postponed annotations: DistributedDataParallel compares a hook's annotations with types.

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import GradBucket

from gpucoll import Compression, GpucollError
from gpucoll.integrations.torch.errors import ArgumentTypeError, as_torchs
from gpucoll.integrations.torch.process_group import ProcessGroup
from gpucoll.integrations.torch.works import Work

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


class CompressedGradients:
    """Averages the gradients of a model in fewer bytes, with error feedback.

    What rounding drops from a bucket is added to the same bucket in the next step, so it arrives
    late but is not lost. Useful for models that wait for their network; within one host it costs
    more than it saves.

    Parameters
    ----------
    compression : str or gpucoll.Compression
        "float16", "bfloat16", "int8_block" or "float8_block" (`docs/compression.md`).

    Notes
    -----
    Each rank keeps a float32 buffer as large as all gradients together. Buckets that are not
    float32 are averaged without compression.

    Examples
    --------
    >>> model = DistributedDataParallel(net)
    >>> CompressedGradients("int8_block").register(model)
    """

    def __init__(self, compression: "str | Compression") -> None:
        self._compression = (
            compression if isinstance(compression, Compression) else Compression(compression)
        )
        self._comm: Any = None
        self._lost: dict[tuple[int, ...], torch.Tensor] = {}

    def register(self, model: "DistributedDataParallel") -> None:
        """Average this model's gradients in this way from now on.

        Raises
        ------
        ArgumentTypeError
            The model's process group has another backend.
        """
        group = getattr(model, "process_group", None)
        if not isinstance(group, ProcessGroup):
            raise ArgumentTypeError(
                "compressed gradients need a DistributedDataParallel on a process group of backend "
                f"gpucoll; got {type(model).__name__} on {group!r}"
            )
        self._comm = group.comm
        model.register_comm_hook(self, _average)

    def start(self, bucket: GradBucket) -> Work:
        """Start averaging a bucket in place."""
        x = bucket.buffer()
        given: dict[str, Any] = {}
        if x.dtype == torch.float32:
            given = {"compression": self._compression, "residual": self._residual(bucket, x)}
        try:
            return Work((self._comm.all_reduce(x, "avg", out=x, async_op=True, **given),), [x])
        except GpucollError as error:
            raise as_torchs(error) from None

    def _residual(self, bucket: GradBucket, x: torch.Tensor) -> torch.Tensor:
        """Return a bucket's residual. DDP once reassigns parameters to buckets: they start anew."""
        parameters = tuple(id(parameter) for parameter in bucket.parameters())
        if parameters not in self._lost:
            if bucket.index() == 0:
                self._lost.clear()
            self._lost[parameters] = torch.zeros_like(x)
        return self._lost[parameters]


def _average(state: CompressedGradients, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.start(bucket).get_future().then(lambda future: future.value()[0])
