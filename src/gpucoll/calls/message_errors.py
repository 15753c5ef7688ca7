"""The errors of messages, and the checks of their peer and tag."""

from __future__ import annotations

import numpy as np

from gpucoll.backends.protocol import MessageRequest
from gpucoll.calls.given import Unchecked
from gpucoll.calls.message import OBJECT_CODE, name_of
from gpucoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeadlineError,
    MismatchError,
    StateError,
)
from gpucoll.transport.shared.words import Kind
from gpucoll.types import ANY_SOURCE, ANY_TAG, TAGS
from gpucoll.wording import rank_of


def check_peer(peer: Unchecked, name: str, world_size: int, may_be_any: bool = False) -> None:
    """Raise unless this is a rank."""
    if isinstance(peer, bool) or not isinstance(peer, int | np.integer):
        raise ArgumentTypeError(f"{name} must be a rank, an int; got {peer!r}")
    if not (0 <= peer < world_size or (may_be_any and peer == ANY_SOURCE)):
        anyone = " or ANY_SOURCE" if may_be_any else ""
        raise ArgumentError(f"{name} must be in 0..{world_size - 1}{anyone}; got {peer}")


def check_tag(tag: Unchecked, may_be_any: bool = False) -> None:
    """Raise unless this is a tag."""
    if isinstance(tag, bool) or not isinstance(tag, int | np.integer):
        raise ArgumentTypeError(f"tag must be an int; got {tag!r}")
    if not (0 <= tag < TAGS or (may_be_any and tag == ANY_TAG)):
        anything = " or ANY_TAG" if may_be_any else ""
        raise ArgumentError(f"tag must be in 0..{TAGS - 1}{anything}; got {tag}")


def misfit_error(request: MessageRequest, rank: int, world_size: int) -> MismatchError:
    """Return the error for a message that is larger than its receive, or of another dtype."""
    buffer = request.buffer
    assert buffer is not None
    what = f"{request.found_bytes} bytes of {name_of(request)}"
    if request.found_dtype == OBJECT_CODE:
        what = "an object, for recv_object"
    elif request.found_shape is not None:
        what = f"{name_of(request)}, shape {request.found_shape}"
    return MismatchError(
        f"recv on {rank_of(rank, world_size)}: the message from rank "
        f"{request.found_peer} with tag {request.found_tag} is {what}, but out is "
        f"{buffer.dtype}, shape {buffer.shape}. The message stays: receive it into an array "
        "that has room for it (probe shows its size), or with neither out nor shape"
    )


def no_object_error(request: MessageRequest, rank: int, world_size: int) -> MismatchError:
    """Return the error for a message that is not an object but is received as one."""
    return MismatchError(
        f"recv_object on {rank_of(rank, world_size)}: the message from rank {request.found_peer} "
        f"with tag {request.found_tag} is {name_of(request)}, shape {request.found_shape}, not an "
        "object. The message stays: receive it with recv"
    )


def gone_error(request: MessageRequest, rank: int, world_size: int) -> StateError:
    """Return the error for a probed message that another receive has taken."""
    return StateError(
        f"recv on {rank_of(rank, world_size)}: the message from rank {request.peer} with tag "
        f"{request.tag} was received already: a Message can be received once, unless another "
        "receive for its source and tag takes it first"
    )


def expired_error(request: MessageRequest, rank: int, world_size: int) -> DeadlineError:
    """Return the error for a receive or probe that has matched no message before its deadline."""
    name = "probe" if request.kind == Kind.PROBE else "recv"
    source = "any rank" if request.peer == ANY_SOURCE else f"rank {request.peer}"
    tag = "any tag" if request.tag == ANY_TAG else f"tag {request.tag}"
    return DeadlineError(
        f"{name} on {rank_of(rank, world_size)}: no message from {source} with {tag} came within "
        f"{request.expired_ns / 1e9:g} s. The {name} was withdrawn: the communicator stays usable"
    )


def untold_error(request: MessageRequest, name: str) -> ArgumentError:
    """Return the error for a message whose description does not tell which array to make."""
    if request.found_dtype == OBJECT_CODE:
        return MismatchError(  # type: ignore[return-value]
            f"recv: the message from rank {request.found_peer} with tag {request.found_tag} is an "
            "object. The message stays: receive it with recv_object"
        )
    return ArgumentError(
        f"recv cannot tell what rank {request.found_peer} has sent ({request.found_bytes} "
        f"bytes of {name}): give out, or shape and dtype"
    )
