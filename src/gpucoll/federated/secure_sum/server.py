"""The server of a secure sum: it adds up masked vectors, and learns what takes the masks off."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from gpucoll.errors import SecureSumError
from gpucoll.federated.secure_sum import keys, messages, shamir
from gpucoll.federated.secure_sum.masks import Vector, add_masks, all_cpus
from gpucoll.federated.secure_sum.messages import Bytes, Kind
from gpucoll.federated.secure_sum.parties import (
    ADVERT_BYTES,
    SEALED_BYTES,
    Advert,
    commitment,
    confirmed_text,
    kept_shares,
    own_mask,
    pair_mask,
    point,
)

if TYPE_CHECKING:
    from gpucoll.federated.secure_sum.protocol import SecureSum


class Step(IntEnum):
    """For which messages the server waits."""

    KEYS = 0
    SHARES = 1
    VECTORS = 2
    CONFIRMATIONS = 3
    UNMASKING = 4
    NOTHING = 5


_KINDS = (Kind.ADVERTISED, Kind.SHARES, Kind.MASKED, Kind.CONFIRMED, Kind.UNMASKED)


class SecureSumServer:
    """The state machine of the server; `SecureSum.server` makes it.

    In each of five steps it takes a message of each client with `receive`, in any order. `advance`
    ends a step: a client whose message has not come is left out from then on. `advance` returns the
    next message to each client. After the fifth step `sum` returns the sum. If one of these raises,
    nothing has changed.

    It holds one vector, to which it adds those that come.
    """

    def __init__(self, settings: SecureSum) -> None:
        self._settings = settings
        self._step = Step.KEYS
        self._expected = frozenset(range(settings.clients))
        self._received: dict[int, bytes] = {}
        self._adverts: dict[int, Advert] = {}
        self._keys_body = b""
        self._commitments: dict[int, bytes] = {}
        self._shared: frozenset[int] = frozenset()
        self._survivors: frozenset[int] = frozenset()
        self._text = b""
        self._total: Vector = np.zeros(0, settings.dtype)

    @property
    def missing(self) -> frozenset[int]:
        """The clients whose message of this step has not come."""
        return self._expected - self._received.keys()

    @property
    def included(self) -> frozenset[int]:
        """The clients whose vectors are in the sum; empty until their step has ended."""
        return self._survivors

    def receive(self, message: Bytes, sender: int | None = None) -> int:
        """Take a client's message.

        Parameters
        ----------
        message : bytes
            What a method of the client returned.
        sender : int, optional
            Who sent the message, if the transport knows it. Default: the message tells it.

        Returns
        -------
        int
            The client that sent it.

        Raises
        ------
        SecureSumError
            The message is damaged, repeated, late or of another sum, or its signature is wrong.
        """
        if self._step == Step.NOTHING:
            raise SecureSumError("the secure sum has ended; its server takes no more messages")
        client, body = messages.unpack(self._settings, _KINDS[self._step], message)
        if sender is not None and sender != client:
            raise SecureSumError(f"client {sender} sent a message in the name of client {client}")
        if client in self._received:
            raise SecureSumError(f"client {client} has already sent its message of this step")
        if client not in self._expected:
            raise SecureSumError(f"client {client} has missed an earlier step, and is left out")
        self._received[client] = self._read(client, body)
        return client

    def _read(self, client: int, body: memoryview) -> bytes:
        """Return what is kept of a body in this step, after all checks that one body allows."""
        if self._step == Step.KEYS:
            (record,) = messages.take_records(body, [client], ADVERT_BYTES).values()
            self._adverts[client] = self._checked(client, record)
            return record
        if self._step == Step.SHARES:
            receivers = len(self._receivers(client, self._expected))
            size = keys.KEY_BYTES + receivers * SEALED_BYTES
            return messages.take_records(body, [client], size)[client]
        if self._step == Step.VECTORS:
            self._add(client, body)
            return b""
        if self._step == Step.CONFIRMATIONS:
            record = messages.take_records(body, [client], keys.SIGNATURE_BYTES)[client]
            if not keys.is_signed(self._adverts[client].verify_key, self._text, record):
                raise SecureSumError(f"client {client} has signed another list of those left")
            return record
        for share in self._shares_in(client, body).values():
            shamir.from_bytes(share)
        return bytes(body)

    def _checked(self, client: int, record: bytes) -> Advert:
        """Return the keys of a client, with which the others can do their next step."""
        advert = Advert.read(self._settings, client, record)
        own = {advert.sealing_key, advert.mask_key}
        others = [a for c, a in self._adverts.items() if c in self._received]
        if len(own) < 2 or any(own & {a.sealing_key, a.mask_key} for a in others):
            raise SecureSumError(f"client {client} has a key twice, or one of another client")
        for public in own:
            keys.shared_secret(bytes(keys.KEY_BYTES), public)
        return advert

    def _receivers(self, client: int, members: frozenset[int]) -> list[int]:
        return kept_shares(self._settings, members - {client}, client)

    def _shares_in(self, client: int, body: Bytes) -> dict[int, bytes]:
        of = kept_shares(self._settings, self._shared, client)
        return messages.take_records(memoryview(body), of, shamir.SHARE_BYTES)

    def _add(self, client: int, body: memoryview) -> None:
        settings = self._settings
        size = settings.length * settings.dtype.itemsize
        if len(body) != size:
            raise SecureSumError(
                f"the vector of client {client} has {len(body)} bytes; {size} were expected"
            )
        vector = np.frombuffer(body, settings.dtype)
        if not settings.is_reduced(vector):
            raise SecureSumError(f"the vector of client {client} has numbers of 2**bits or more")
        np.add(self._total, vector, out=self._total)

    def advance(self) -> dict[int, bytes]:
        """End a step; return the next message to each client that is still there.

        Raises
        ------
        TooFewClientsError
            Too few messages have come. More can still be received, and `advance` called again.
        SecureSumError
            All steps but the last have ended; `sum` ends that.
        """
        step, settings = self._step, self._settings
        here = frozenset(self._received)
        if step >= Step.UNMASKING:
            raise SecureSumError("the secure sum has no further messages to clients: call sum()")
        wanted = here if step <= Step.SHARES else self._shared
        settings.check_left(wanted, here, f"server, step {step.name}")
        bodies = (self._keys, self._relayed, self._left, self._confirmations)[step](here)
        self._expected, self._received = here, {}
        self._step = Step(step + 1)
        kind = Kind(_KINDS[step] + 1)
        return {c: messages.pack(settings, kind, c, body) for c, body in bodies.items()}

    def _set(self, clients: frozenset[int]) -> bytes:
        return messages.pack_set(clients, self._settings.clients)

    def _keys(self, here: frozenset[int]) -> dict[int, bytes]:
        self._keys_body = self._set(here) + messages.pack_records(self._received)
        return dict.fromkeys(sorted(here), self._keys_body)

    def _relayed(self, here: frozenset[int]) -> dict[int, bytes]:
        """Return the shares that each client gets, from the clients that have shared theirs."""
        sent: dict[int, dict[int, bytes]] = {client: {} for client in sorted(here)}
        for sender, record in self._received.items():
            self._commitments[sender] = record[: keys.KEY_BYTES]
            sealed = memoryview(record)[keys.KEY_BYTES :]
            receivers = self._receivers(sender, self._expected)
            for receiver, share in messages.take_records(sealed, receivers, SEALED_BYTES).items():
                if receiver in here:
                    sent[receiver][sender] = share
        self._shared = here
        self._total = np.zeros(self._settings.length, self._settings.dtype)
        return {c: self._set(here) + messages.pack_records(sent[c]) for c in sent}

    def _left(self, here: frozenset[int]) -> dict[int, bytes]:
        self._survivors = here
        self._text = confirmed_text(
            self._settings, self._keys_body, self._set(self._shared), self._set(here)
        )
        return dict.fromkeys(sorted(here), self._set(here))

    def _confirmations(self, here: frozenset[int]) -> dict[int, bytes]:
        body = self._set(here) + messages.pack_records(self._received)
        return dict.fromkeys(sorted(here), body)

    def sum(self) -> Vector:
        """End the last step; return the sum modulo 2**bits of the vectors of `included`.

        Returns
        -------
        numpy.ndarray
            Unsigned integers, shape (length,).

        Raises
        ------
        TooFewClientsError
            Too few clients have sent shares. More can still be received, and `sum` called again.
        SecureSumError
            It is not time for the sum, or the shares of a secret do not fit together.

        Cost: a pass of ChaCha20 over the vector for each client in the sum, and for each pair of
        a client that left and one in the sum that had a mask in common, on all CPUs of the process;
        memory of one vector.
        """
        if self._step != Step.UNMASKING:
            raise SecureSumError(f"the secure sum is not at its end, but at step {self._step.name}")
        here, settings = frozenset(self._received), self._settings
        settings.check_left(self._shared, here, "server, step UNMASKING")
        shares = {c: self._shares_in(c, body) for c, body in sorted(self._received.items())}
        masks = []
        for client in sorted(self._shared):
            secret = self._joined(client, shares)
            if client in self._survivors:
                masks.append((own_mask(settings, secret, client), False))
                continue
            for other in self._receivers(client, self._survivors):
                public = self._adverts[other].mask_key
                pair = pair_mask(settings, secret, public, client, other)
                masks.append((pair, client < other))
        add_masks(self._total, masks, all_cpus())
        settings.reduce(self._total)
        self._step, total = Step.NOTHING, self._total
        self._received, self._total = {}, np.zeros(0, settings.dtype)
        return total

    def _joined(self, client: int, shares: Mapping[int, Mapping[int, bytes]]) -> bytes:
        """Return a client's seed or mask key, after a check that it is the one it shared."""
        settings = self._settings
        holders = [holder for holder in settings.holders(client) if holder in shares]
        used = {point(holder): shares[holder][client] for holder in holders[: settings.threshold]}
        secret = shamir.to_bytes(shamir.join(used))
        if client in self._survivors:
            is_right = commitment(settings, secret, client) == self._commitments[client]
        else:
            is_right = keys.public_key(secret) == self._adverts[client].mask_key
        if not is_right:
            raise SecureSumError(
                f"the shares of client {client} do not give the secret that it had: it or one of "
                f"the clients {holders[: settings.threshold]} sent a wrong one. There is no sum"
            )
        return secret
