"""`SecureSum`: the settings of a sum that shows the server nothing but the sum."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.errors import ArgumentError, ArgumentTypeError, TooFewClientsError
from gpucoll.federated.secure_sum import keys
from gpucoll.federated.secure_sum.client import SecureSumClient
from gpucoll.federated.secure_sum.masks import Vector
from gpucoll.federated.secure_sum.server import SecureSumServer

_MOST_CLIENTS = 1 << 16
_MOST_BYTES = 1 << 38  # what one stream of ChaCha20 is long


class SecureSum:
    """A sum of the vectors of several clients, of which a server learns the sum alone.

    The protocol of Bonawitz et al. (2017), with the neighbours of Bell et al. (2020). This object
    holds the settings, which all parties must have alike. `client` and `server` make the state
    machines. They take and return bytes; the program moves these. See `docs/federated.md`.

    Parameters
    ----------
    clients : int
        Number of clients, 2 to 65,536. They are numbered from 0.
    threshold : int
        How many of those clients that hold the shares of a client must stay to the end. With
        `neighbours` None these are all clients, and `threshold` must be more than half of them,
        so that two different lists of clients cannot both be confirmed. With `neighbours` k they
        are the client and its k neighbours; `threshold` is k/2 + 2 to k + 1, and more than half of
        all clients must stay, too. With k/2 + 2 + h, up to h of them may help the server.
    length : int
        Number of integers in a vector.
    bits : int
        The sum is modulo 2**bits, 8 to 64. Vectors have the smallest unsigned dtype that holds so
        many bits, in memory and in messages.
    neighbours : int, optional
        Even number k of clients with which a client shares keys and masks. Default: all. The graph
        is drawn for each `round_id` from the settings, which everybody knows.
    round_id : int
        Number of this sum, 0 to 2**64 - 1. Messages of one round are refused in another.
    verify_keys : sequence of bytes, optional
        Each client's public Ed25519 key, 32 bytes, which the parties have from elsewhere than this
        server. Default: clients make keys, and the server hands them on, which protects from less
        (`docs/federated.md`).
    context : bytes
        What else must be alike for all parties, such as the model that they train and how they
        round: parties with another context refuse each other's messages. If the server could give
        each client another model, or another clip, it could make all vectors but one zero.

    Attributes
    ----------
    dtype : numpy.dtype
        The dtype of vectors.
    digest : bytes
        A digest of all settings, 32 bytes, which clients sign with the list of those that are left.
    tag : bytes
        Its first 16 bytes, in each message.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        A setting is wrong.
    BackendUnavailableError
        The package cryptography is not installed.
    """

    def __init__(
        self,
        clients: int,
        threshold: int,
        length: int,
        bits: int = 32,
        neighbours: int | None = None,
        *,
        round_id: int = 0,
        verify_keys: Sequence[bytes] | None = None,
        context: bytes = b"",
    ) -> None:
        self.clients = clients = _whole("clients", clients, 2, _MOST_CLIENTS)
        self.bits = _whole("bits", bits, 8, 64)
        self.dtype: np.dtype[Any] = np.min_scalar_type((1 << self.bits) - 1)
        self.length = _whole("length", length, 0, _MOST_BYTES // self.dtype.itemsize)
        self.round_id = _whole("round_id", round_id, 0, 2**64 - 1)
        if neighbours is not None:
            neighbours = _whole("neighbours", neighbours, 2, clients - 1)
            if neighbours % 2:
                raise ArgumentError(f"neighbours must be an even number; got {neighbours}")
        self.neighbours = neighbours
        fewest = clients // 2 + 1 if neighbours is None else neighbours // 2 + 2
        most = clients if neighbours is None else neighbours + 1
        self.threshold = _whole("threshold", threshold, fewest, most)
        self.least_clients = max(self.threshold, clients // 2 + 1)
        self.verify_keys = None if verify_keys is None else _checked(verify_keys, clients)
        if not isinstance(context, bytes):
            raise ArgumentTypeError(f"context must be bytes; got {type(context).__name__}")
        self.digest = self._digest(context)
        self.tag = self.digest[:16]
        self._holders = self._drawn_graph()

    def _digest(self, context: bytes) -> bytes:
        numbers = struct.pack(
            "<IIQIIQ",
            *(self.clients, self.threshold, self.length),
            *(self.bits, self.neighbours or 0, self.round_id),
        )
        known = b"".join(self.verify_keys or ())
        digest = hashlib.sha256(context).digest()
        return hashlib.sha256(b"gpucoll secure sum" + numbers + digest + known).digest()

    def _drawn_graph(self) -> list[tuple[int, ...]]:
        """Return which clients hold the shares of each: those around it in a random circle."""
        everybody = range(self.clients)
        if self.neighbours is None:
            return [tuple(everybody)]
        circle = sorted(everybody, key=lambda i: hashlib.sha256(b"%b %d" % (self.tag, i)).digest())
        half = self.neighbours // 2
        holders: list[tuple[int, ...]] = [()] * self.clients
        for place, client in enumerate(circle):
            around = range(place - half, place + half + 1)
            holders[client] = tuple(sorted(circle[n % self.clients] for n in around))
        return holders

    def holders(self, client: int) -> tuple[int, ...]:
        """Return the clients that hold shares of a client, itself among them, in order.

        They are also the clients with which it has masks in common.
        """
        return self._holders[client if self.neighbours is not None else 0]

    def client(
        self,
        number: int,
        *,
        signing_key: bytes | None = None,
        random: Callable[[int], bytes] = os.urandom,
    ) -> SecureSumClient:
        """Return the state machine of a client, with new keys.

        Parameters
        ----------
        number : int
            Which client, 0 to clients - 1.
        signing_key : bytes, optional
            Its private Ed25519 key, 32 bytes. Needed with `verify_keys`; default: a new one.
        random : callable
            random(n_bytes) returns random bytes. For tests; who knows them knows all masks.
        """
        number = _whole("a client's number", number, 0, self.clients - 1)
        if signing_key is None:
            if self.verify_keys is not None:
                raise ArgumentError(f"client {number} needs a signing_key: verify_keys were given")
            signing_key = random(keys.KEY_BYTES)
        public = keys.verify_key(_key("signing_key", signing_key))
        if self.verify_keys is not None and public != self.verify_keys[number]:
            raise ArgumentError(f"signing_key is not that of verify_keys[{number}]")
        return SecureSumClient.new(self, number, signing_key, random)

    def resume(self, state: bytes) -> SecureSumClient:
        """Return the client of which ``state()`` returned these bytes, maybe in another process."""
        return SecureSumClient.resumed(self, state)

    def server(self) -> SecureSumServer:
        """Return the state machine of the server."""
        return SecureSumServer(self)

    def checked(self, x: npt.ArrayLike) -> Vector:
        """Return a copy of a client's vector; raise if it is none, or has too large numbers."""
        given = np.asarray(x)
        if given.dtype.kind != "u" or given.dtype.itemsize > self.dtype.itemsize:
            raise ArgumentTypeError(
                f"x must have a dtype of unsigned integers up to {self.dtype}; got {given.dtype}"
            )
        if given.shape != (self.length,):
            raise ArgumentError(f"x must have the shape ({self.length},); got {given.shape}")
        vector = given.astype(self.dtype)
        if not self.is_reduced(vector):
            # Which number is too large stays here: programs send errors to the server.
            raise ArgumentError(f"x must be below 2**{self.bits}; it has a larger number")
        return vector

    def is_reduced(self, vector: Vector) -> bool:
        """Return whether all numbers are below 2**bits."""
        return self._fills_words or not len(vector) or int(vector.max()) < 1 << self.bits

    def reduce(self, vector: Vector) -> None:
        """Take a vector modulo 2**bits, in place."""
        if not self._fills_words:
            np.bitwise_and(vector, self.dtype.type((1 << self.bits) - 1), out=vector)

    @property
    def _fills_words(self) -> bool:
        return self.bits == 8 * self.dtype.itemsize

    def check_left(self, wanted: Collection[int], left: Collection[int], step: str) -> None:
        """Raise TooFewClientsError unless enough clients are left to unmask those wanted."""
        if len(left) < self.least_clients:
            raise TooFewClientsError(
                f"{step}: {len(left)} of {self.clients} clients are left, and the secure sum needs "
                f"{self.least_clients}: nothing of it can be revealed. Begin a new round"
            )
        if self.neighbours is None:
            return
        still = frozenset(left)
        for client in wanted:
            held = sum(holder in still for holder in self.holders(client))
            if held < self.threshold:
                raise TooFewClientsError(
                    f"{step}: {held} of the {self.neighbours + 1} clients that hold shares of "
                    f"client {client} are left, and the secure sum needs {self.threshold}: nothing "
                    "of it can be revealed. Begin a new round, or have more neighbours"
                )


def _whole(name: str, value: int, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ArgumentTypeError(f"{name} must be an int; got {value!r}")
    if not least <= value <= most:
        raise ArgumentError(f"{name} must be {least} to {most}; got {value}")
    return int(value)


def _checked(verify_keys: Sequence[bytes], clients: int) -> tuple[bytes, ...]:
    found = tuple(_key("each of verify_keys", key) for key in verify_keys)
    if len(found) != clients or len(set(found)) != clients:
        raise ArgumentError(
            f"verify_keys must be {clients} different keys, one for each client; got {len(found)}, "
            f"of which {len(set(found))} differ"
        )
    return found


def _key(name: str, key: bytes) -> bytes:
    if not isinstance(key, bytes):
        raise ArgumentTypeError(f"{name} must be bytes; got {type(key).__name__}")
    if len(key) != keys.KEY_BYTES:
        raise ArgumentError(f"{name} must have {keys.KEY_BYTES} bytes; got {len(key)}")
    return key
