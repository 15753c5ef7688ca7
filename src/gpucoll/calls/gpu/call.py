"""One call on GPU arrays, in terms of the arrays that the user passed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gpucoll.arrays import streams
from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.library import Template
from gpucoll.backends.choice import HOST_ARRAYS
from gpucoll.backends.protocol import MessageRequest, Request

if TYPE_CHECKING:
    from gpucoll.calls.gpu.work import GpuWork


@dataclass
class GpuCall:
    """One call on GPU arrays: what it moves, and how its result is made.

    Attributes
    ----------
    name : str
        The name of the call.
    requests : list of Request
        The collectives of the call; empty for messages.
    messages : list of MessageRequest
    finish : callable
        Called once after the call is issued (or waited for); returns the user's result.
    template : Template
        The template of its arrays: device, library, current stream.
    is_own : bool
        Whether all of the memory is the user's.
    stream : stream, optional
        The stream to run on. Default: the library's current stream.
    timeout_s : float, optional
        How long it may take after its start.
    work : GpuWork, optional
        What the user already got for it, inside a group of asynchronous calls.
    """

    name: str
    template: Template
    finish: Callable[[], Any]
    requests: Sequence[Request] = ()
    messages: Sequence[MessageRequest] = ()
    is_own: bool = False
    stream: Any = None
    timeout_s: float | None = None
    work: GpuWork | None = None
    address: int = field(init=False)
    """The address of the stream."""

    def __post_init__(self) -> None:
        current = self.template.stream
        is_given = self.stream is not None and not self.is_on_host  # host arrays have no streams
        self.address = streams.address_of(self.stream) if is_given else current

    @property
    def is_on_host(self) -> bool:
        """Whether its arrays are in host memory, on a communicator with ``mixed=True``."""
        return self.template.device == HOST_ARRAYS

    @property
    def must_complete(self) -> bool:
        """Whether the call must be done before its arrays can be used, as no stream orders that."""
        return self.is_on_host or not streams.is_stream_ordered(self.template.library)

    def on_stream(self, address: int) -> GpuCall:
        """Return the call, on host arrays, with a stream of the communicator."""
        made = replace(self, template=self.template._replace(stream=address), stream=None)
        made.address = address
        return made

    @property
    def buffers(self) -> list[Buffer]:
        """All memory of the call."""
        found: list[Buffer | None] = [message.buffer for message in self.messages]
        for request in self.requests:
            pairs = request.parts or ((request.source, request.destination),)
            found += [buffer for pair in pairs for buffer in pair]
            found += request.residuals
        return [buffer for buffer in found if buffer is not None]
