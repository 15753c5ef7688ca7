"""One call on GPU arrays, as its arrays were given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpucoll.arrays import streams
from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.library import Template
from gpucoll.backends.choice import HOST_ARRAYS
from gpucoll.backends.protocol import MessageRequest, Request


@dataclass
class GpuCall:
    """One call as its arrays were given: what to move, and how its result is made.

    Attributes
    ----------
    name : str
        What the user called.
    requests : list of Request
        Collectives; empty for messages.
    messages : list of MessageRequest
    finish : callable
        Called once after the call is issued (or waited for): returns what the user gets.
    template : Template
        Of its arrays: device, library, current stream.
    is_own : bool
        Whether all of the memory is the user's.
    stream : stream, optional
        Where to run instead of the library's current stream.
    timeout_s : float, optional
        How long it may take from its start on.
    """

    name: str
    template: Template
    finish: Callable[[], Any]
    requests: Sequence[Request] = ()
    messages: Sequence[MessageRequest] = ()
    is_own: bool = False
    stream: Any = None
    timeout_s: float | None = None
    address: int = field(init=False)
    """Of the stream."""

    def __post_init__(self) -> None:
        current = self.template.stream
        is_given = self.stream is not None and not self.is_on_host  # whose arrays know no streams
        self.address = streams.address_of(self.stream) if is_given else current

    @property
    def is_on_host(self) -> bool:
        """Whether its arrays lie in host memory: of a communicator with ``mixed=True``."""
        return self.template.device == HOST_ARRAYS

    @property
    def must_complete(self) -> bool:
        """Whether it has to be done before its arrays can be used: nothing orders that after it."""
        return self.is_on_host or not streams.is_stream_ordered(self.template.library)

    def on_stream(self, address: int) -> GpuCall:
        """Return it with a stream of the communicator's: of host arrays, which have none."""
        made = replace(self, template=self.template._replace(stream=address), stream=None)
        made.address = address
        return made

    @property
    def buffers(self) -> list[Buffer]:
        """All of its memory."""
        found: list[Buffer | None] = [message.buffer for message in self.messages]
        for request in self.requests:
            pairs = request.parts or ((request.source, request.destination),)
            found += [buffer for pair in pairs for buffer in pair]
            if request.compressed is not None:
                found += request.compressed.residuals
        return [buffer for buffer in found if buffer is not None]
